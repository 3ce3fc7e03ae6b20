"""The model over whole sequences, without caches and with gradients, and the loss it is trained with."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from qwen38_jax.block import Block, chain_block
from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.attention import (
    Partial,
    Rows,
    group_queries,
    merge,
    normalise,
    output,
    partial_attention,
    project,
)
from qwen38_jax.layers.gated_delta_net import gated_delta_net, whole_rule
from qwen38_jax.layers.linear import embed, linear
from qwen38_jax.layers.norm import rms_norm
from qwen38_jax.layers.rope import RopeTable, rope_table
from qwen38_jax.model import add_mlp, logits
from qwen38_jax.params import DecoderLayer, Params, cast

Array = jax.Array


def sequence_forward(params: Params, cfg: ModelConfig, tokens: Array) -> Array:
    """Hidden rows `[B, T, H]` after the final norm for `tokens [B, T]`; equals `model.forward` from an empty state."""
    block = _whole(tokens)
    rope = rope_table(block.positions, cfg)
    groups = jax.tree.map(lambda t: t.reshape(cfg.num_groups, cfg.linear_per_group, *t.shape[1:]), params.linear)
    # A loop copies what its backward pass needs into stacked buffers and out again, a third of a step's time on a GPU.
    # On a CPU, where compiling for longer is not repaid, it stays a loop.
    scan = functools.partial(lax.scan, unroll=jax.default_backend() == "gpu")

    def group(x, layers):
        linear_layers, full_layer = layers
        x, _ = scan(lambda x, layer: (_linear_layer(layer, cfg, x, block), None), x, linear_layers)
        return _full_layer(full_layer, cfg, x, rope), None

    x, _ = scan(group, embed(params.embed, tokens), (groups, params.full))
    return rms_norm(x, params.norm, cfg.rms_norm_eps)


def mtp_sequence(params: Params, cfg: ModelConfig, tokens: Array, hidden: Array) -> Array:
    """Rows `[B, T - 1, H]` of the MTP head over whole sequences; row t predicts token t + 2.

    tokens: `[B, T]`; hidden: `[B, T, H]` as `sequence_forward` returns it.
    """
    head, eps = params.mtp, cfg.rms_norm_eps
    # The last row has no token after it and is dropped. Kept so far, it keeps the length even: the flash kernel's
    # gradient takes no other (jax 0.11).
    following = rms_norm(embed(params.embed, jnp.roll(tokens, -1, axis=1)), head.embedding_norm, eps)
    known = rms_norm(hidden, head.hidden_norm, eps)
    x = linear(jnp.concatenate([following, known], axis=-1), head.fc)
    x = _full_layer(head.layer, cfg, x, rope_table(_whole(tokens).positions, cfg))
    return rms_norm(x[:, :-1], head.norm, eps)


def mtp_chain(
    params: Params,
    cfg: ModelConfig,
    tokens: Array,
    hidden: Array,
    depth: int,
    choose: Callable[[Array], Array] | None = None,
) -> Array:
    """Rows of the MTP head as it drafts, a chain from every position at once: `[depth, B, T, H]`.

    Row t of depth d (from 1) predicts token t + 1 + d. Depth 1 reads the model's hidden row at t and the token after
    it; every other one the row of the depth before at the same t and the next token, at the position after. A chain
    attends, as in serving, to the rows of depth 1 up to its own and to what it has added itself.

    Args:
      tokens: `[B, T]`; hidden: `[B, T, H]`, of a text from its beginning. What a row reads beyond the end is token 0.
      choose: makes ids `[B, T]` of rows `[B, T, H]`, the drafts that the next depth reads; None reads the text's own
        tokens (teacher forcing).
    """
    head, eps, length = params.mtp, cfg.rms_norm_eps, tokens.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    positions = _whole(tokens).positions
    committed: Rows | None = None
    added: list[tuple[Array, Array]] = []  # keys and values of depths from 2 on
    drafts, chain = tokens, []
    for d in range(1, depth + 1):
        if d == 1 or choose is None:
            drafts = jnp.pad(tokens, ((0, 0), (0, d)))[:, d:]
        else:
            drafts = choose(hidden)
        x = [rms_norm(embed(params.embed, drafts), head.embedding_norm, eps), rms_norm(hidden, head.hidden_norm, eps)]
        x = linear(jnp.concatenate(x, axis=-1), head.fc)
        rope = rope_table(positions + d - 1, cfg)
        rows = project(head.layer.mixer, cfg, rms_norm(x, head.layer.input_norm, eps), rope)
        if committed is None:
            committed = rows
        else:
            added.append((rows.k, rows.v))
        q = group_queries(rows.q, rows.k.shape[2])
        # Worked out again in the backward pass: its scores are [T, T] for every head and depth.
        attended = jax.checkpoint(partial_attention)(q, committed.k, committed.v, causal)
        for k, v in added:
            attended = merge(attended, _of_own_row(q, k, v))
        hidden = add_mlp(head.layer, cfg, x + output(head.layer.mixer, rows, normalise(attended)))
        hidden = rms_norm(hidden, head.norm, eps)
        chain.append(hidden)
    return jnp.stack(chain)


def _of_own_row(q: Array, k: Array, v: Array) -> Partial:
    """Attention of row t to one key, at t: `q [B, kv_heads, r, T, D]`, `k, v [B, T, kv_heads, D]`."""
    k, v = (t.transpose(0, 2, 1, 3)[:, :, None].astype(jnp.float32) for t in (k, v))
    score = jnp.sum(q.astype(jnp.float32) * k, axis=-1) * q.shape[-1] ** -0.5
    return Partial(jnp.broadcast_to(v, q.shape), score, jnp.ones_like(score))


def language_model_loss(
    params: Params, cfg: ModelConfig, tokens: Array, weights: Array, mtp_weight: float
) -> tuple[Array, dict[str, Array]]:
    """Mean cross-entropy of the next token, plus `mtp_weight` times that of the MTP head's token after it.

    tokens: `[B, T]`; weights: `[B, T]`, how much the prediction of each token counts. Parameters are cast to
    the dtypes of `cfg` for the computation. Returns the loss and both parts, fp32 scalars; the second only with a head.
    """
    params = cast(params, cfg)
    hidden = sequence_forward(params, cfg, tokens)
    parts = {"loss": _cross_entropy(params, hidden[:, :-1], tokens[:, 1:], weights[:, 1:])}
    total = parts["loss"]
    if params.mtp is not None:
        rows = mtp_sequence(params, cfg, tokens, hidden)
        parts["mtp_loss"] = _cross_entropy(params, rows[:, :-1], tokens[:, 2:], weights[:, 2:])
        total = total + mtp_weight * parts["mtp_loss"]
    return total, parts


def _cross_entropy(params: Params, hidden: Array, targets: Array, weights: Array) -> Array:
    scores = logits(params, hidden)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(scores, axis=-1) - picked
    weights = weights.astype(jnp.float32)
    return jnp.sum(loss * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def _whole(tokens: Array) -> Block:
    return chain_block(tokens, jnp.zeros(tokens.shape[0], jnp.int32))


def _linear_layer(layer: DecoderLayer, cfg: ModelConfig, x: Array, block: Block) -> Array:
    batch = x.shape[0]
    heads = (cfg.linear_num_value_heads, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
    state = jnp.zeros((batch, *heads), jnp.float32)
    window = jnp.zeros((batch, cfg.linear_conv_kernel_dim - 1, cfg.conv_channels), x.dtype)
    h = rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
    y, *_ = gated_delta_net(layer.mixer, cfg, h, block, lambda inputs: whole_rule(inputs, state, block), window)
    return add_mlp(layer, cfg, x + y)


def _full_layer(layer: DecoderLayer, cfg: ModelConfig, x: Array, rope: RopeTable) -> Array:
    rows = project(layer.mixer, cfg, rms_norm(x, layer.input_norm, cfg.rms_norm_eps), rope)
    # The flash kernel keeps no score matrix; it takes half precision and even lengths only.
    fused = jax.default_backend() == "gpu" and x.dtype != jnp.float32 and x.shape[1] % 2 == 0
    attended = jax.nn.dot_product_attention(
        rows.q, rows.k, rows.v, is_causal=True, implementation="cudnn" if fused else "xla"
    )
    return add_mlp(layer, cfg, x + output(layer.mixer, rows, attended))
