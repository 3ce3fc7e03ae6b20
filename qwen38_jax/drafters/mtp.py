"""The multi-token-prediction head: one attention layer that reads what the model knows at t and the token after t.

As a drafter it is chained: the row that predicted a draft is the next one's hidden row. Its cache then holds what the
chain wrote; when the model has read the tokens that stay, their rows are run again with the model's own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from qwen38_jax.block import Block, visible
from qwen38_jax.config import ModelConfig
from qwen38_jax.drafters.interface import (
    MTP,
    DraftContext,
    Observed,
    Proposal,
    draft_log_q,
    draw_candidate,
    point_masses,
)
from qwen38_jax.layers.attention import Context, attend, output, project
from qwen38_jax.layers.linear import embed, linear
from qwen38_jax.layers.norm import rms_norm
from qwen38_jax.layers.rope import rope_table
from qwen38_jax.model import add_mlp, logits
from qwen38_jax.params import DraftHead, Params
from qwen38_jax.sampling import mask_padding
from qwen38_jax.state import KvCache, StateConfig, abstract_state, write_rows
from qwen38_jax.tree import Tree

Array = jax.Array

# Sampled drafts come from the highest scores only, renormalised: that is their q, and few numbers describe it.
_CANDIDATES = 64


def mtp_forward(
    params: Params, cfg: ModelConfig, block: Block, hidden: Array, kv: KvCache, block_table: Array, lengths: Array
) -> tuple[Array, KvCache]:
    """Runs rows of the head, whose output at t predicts the token at t + 2.

    Args:
      block: `[B, L]` rows; row t holds the token at t + 1, under position t.
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
        rope = rope_table(block.positions, cfg)
        rows = project(layer.mixer, cfg, rms_norm(x, layer.input_norm, eps), rope, cfg.kernels)
        kv = write_rows(kv, 0, block_table, rows.k, rows.v, block.positions, block.valid)
        written = jnp.where(block.valid, block.positions, -1)
        context = Context(kv.k, kv.v, 0, block_table, lengths, written)
        attended = attend(rows, visible(block), context, cfg.kernels)
        x = add_mlp(layer, cfg, x + output(layer.mixer, rows, attended))
        return rms_norm(x, head.norm, eps), kv


@struct.dataclass
class Mtp:
    """The head of `params.mtp` as a drafter of chains. Its state is a cache of P - 1 rows for P tokens read.

    head: rows of the output head to draft from, or None for all of it.
    draft_tokens: K, length of the chain. truncate: see `interface.draft_log_q`.
    """

    head: DraftHead | None
    draft_tokens: int = struct.field(pytree_node=False)
    truncate: bool = struct.field(pytree_node=False, default=True)

    name = "mtp"

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return ()

    def init(self, cfg: ModelConfig, sizes: StateConfig) -> KvCache:
        kv = abstract_state(cfg, sizes).kv
        return jax.tree.map(lambda pool: jnp.zeros((1, *pool.shape[1:]), pool.dtype), kv)

    def propose(
        self, params: Params, cfg: ModelConfig, context: DraftContext, state: KvCache
    ) -> tuple[Proposal, KvCache]:
        def draft(carry, step):
            token, hidden, kv = carry
            at = context.position - 1 + step
            block = Block(token[:, None], at[:, None], context.active[:, None])
            rows, kv = mtp_forward(params, cfg, block, hidden[:, None], kv, context.block_table, at)
            hidden = rows[:, 0]
            with jax.named_scope("draft_head"):
                ids, scores = self._candidates(params, hidden, context)
                log_q = draft_log_q(scores, context.sampler, self.truncate)
                drawn = draw_candidate(log_q, context.sampler, at + 2)
                token = jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
            return (token, hidden, kv), (token, ids, log_q)

        first = (context.anchor, context.hidden, state)
        (_, _, state), drafts = lax.scan(draft, first, jnp.arange(self.draft_tokens))
        tokens, ids, log_q = (jnp.moveaxis(t, 0, 1) for t in drafts)
        whole = jnp.broadcast_to(context.active[:, None], tokens.shape)
        return Proposal(tokens, ids, log_q, jnp.zeros_like(whole), whole, jnp.full_like(tokens, MTP)), state

    def propose_tree(
        self, params: Params, cfg: ModelConfig, context: DraftContext, state: KvCache, tree: Tree
    ) -> tuple[Proposal, KvCache]:
        """The drafts of a tree, level by level: those that follow a row are its likeliest tokens.

        All rows above a level are run again for it, rather than kept: siblings would share a place in the cache.
        """
        batch, width = len(context.anchor), len(tree.parents)
        tokens = jnp.zeros((batch, width), jnp.int32).at[:, 0].set(context.anchor)
        hidden = jnp.zeros((batch, width, context.hidden.shape[-1]), context.hidden.dtype).at[:, 0].set(context.hidden)
        valid = jnp.broadcast_to(context.active[:, None], tokens.shape)
        positions = context.position[:, None] - 1 + tree.depths
        for depth in range(1, tree.depth + 1):
            children, parents, ranks = tree.level(depth)
            above = slice(0, children[0])
            block = Block(
                tokens[:, above],
                positions[:, above],
                valid[:, above],
                jnp.broadcast_to(tree.parents[above], (batch, children[0])),
            )
            rows, state = mtp_forward(
                params, cfg, block, hidden[:, above], state, context.block_table, context.position - 1
            )
            before, slot = np.unique(parents, return_inverse=True)  # each row's head is read once
            with jax.named_scope("draft_head"):
                ids, _ = self._candidates(params, rows[:, before], context)
            known = ranks < ids.shape[-1]
            tokens = tokens.at[:, children].set(ids[:, slot, np.where(known, ranks, 0)])
            valid = valid.at[:, children].set(valid[:, children] & known)
            hidden = hidden.at[:, children].set(rows[:, parents])
        return point_masses(tokens[:, 1:], valid[:, 1:], MTP), state

    def observe(self, params: Params, cfg: ModelConfig, rows: Observed, state: KvCache) -> KvCache:
        following = rows.valid[:, :-1, None]
        hidden = jnp.where(following, rows.hidden[:, :-1], rows.before[:, None])
        hidden = jnp.concatenate([rows.before[:, None], hidden], axis=1)
        at = rows.positions - 1
        valid = rows.valid & (at >= 0)  # no row of the head reads the first token
        read = jnp.min(jnp.where(valid, at, jnp.iinfo(jnp.int32).max), axis=1)
        block = Block(rows.tokens, jnp.where(valid, at, 0), valid)
        read = jnp.where(jnp.any(valid, axis=1), read, 0)
        return mtp_forward(params, cfg, block, hidden, state, rows.block_table, read)[1]

    def _candidates(self, params: Params, hidden: Array, context: DraftContext) -> tuple[Array, Array]:
        """Ids and scores, each `[..., C]`, of the highest scores of `hidden [..., H]`."""
        if self.head is None:
            scores = mask_padding(logits(params, hidden), context.sampler.real_vocab_size)
        else:
            scores = mask_padding(linear(hidden, self.head.weight, jnp.float32), len(self.head.ids))
        scores, ids = lax.top_k(scores, min(_CANDIDATES, scores.shape[-1]))
        return (ids if self.head is None else self.head.ids[ids].astype(jnp.int32)), scores
