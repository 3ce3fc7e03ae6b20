"""The multi-token-prediction head: one attention layer that reads what the model knows at t and the token after t."""

import jax
import jax.numpy as jnp

from qwen38_jax.block import Block, visible
from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.attention import Context, attend, output, project
from qwen38_jax.layers.linear import embed, linear
from qwen38_jax.layers.norm import rms_norm
from qwen38_jax.layers.rope import rope_table
from qwen38_jax.model import add_mlp
from qwen38_jax.params import Params
from qwen38_jax.state import KvCache, write_rows

Array = jax.Array


def mtp_forward(
    params: Params, cfg: ModelConfig, block: Block, hidden: Array, kv: KvCache, block_table: Array, lengths: Array
) -> tuple[Array, KvCache]:
    """Runs rows of the head, whose output at t predicts the token at t + 2.

    Args:
      block: a chain of `[B, L]` rows; row t holds the token at t + 1, under position t.
      hidden: `[B, L, H]`, for each row the model's hidden row at t (after the final norm), or this head's own output
        when drafts are chained.
      kv: the head's cache, one layer; block_table `[B, max_pages]` may be the model's own, of equal page size.
      lengths: `[B]` rows of the cache to read. Rows of the block are written at their positions, over what a chained
        draft may have left there.

    Returns:
      `[B, L, H]` after the head's norm, ready for `model.logits`; the cache with the block's valid rows.
    """
    head = params.mtp
    eps = cfg.rms_norm_eps
    with jax.named_scope("mtp"):
        tokens = rms_norm(embed(params.embed, block.tokens), head.embedding_norm, eps)
        x = linear(jnp.concatenate([tokens, rms_norm(hidden, head.hidden_norm, eps)], axis=-1), head.fc)
        layer = head.layer
        rows = project(layer.mixer, cfg, rms_norm(x, layer.input_norm, eps), rope_table(block.positions, cfg))
        kv = write_rows(kv, 0, block_table, rows.k, rows.v, block.positions, block.valid)
        context = Context(kv.k, kv.v, 0, block_table, lengths)
        x = add_mlp(layer, cfg, x + output(layer.mixer, rows, attend(rows, visible(block), context)))
        return rms_norm(x, head.norm, eps), kv
