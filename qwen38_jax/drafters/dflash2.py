"""DFlash2: drafts a block of tokens in one pass, from what the target's layers made of the text before it.

A block is the anchor (the text's last token, which the target has not read yet) and masks; the row of a mask predicts
the token at its own position. Each layer attends to the block itself, in both directions, and to keys and values made
of the target's residual streams at the positions before the anchor. Those depend on their position only: they are made
once, when a row of the target is committed, and kept. What a block makes of itself is thrown away.

Embedding and output head are the target's. Norms and statistics are fp32 whatever the dtype.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from qwen38_jax.config import DFlash2Config, ModelConfig
from qwen38_jax.drafters.interface import DFLASH2, DraftContext, Observed, Proposal, point_masses
from qwen38_jax.drafters.selector import Lattice, make_lattice, tree_walk, walk
from qwen38_jax.layers.attention import group_queries, merge, normalise, partial_attention
from qwen38_jax.layers.linear import embed, linear
from qwen38_jax.layers.mlp import mlp
from qwen38_jax.layers.norm import plain_rms_norm
from qwen38_jax.layers.rope import RopeTable, apply_rope, text_rope_table
from qwen38_jax.model import logits
from qwen38_jax.params import BlockAttention, BlockConv, DFlash2Layer, DFlash2Params, Params, layer_at
from qwen38_jax.state import StateConfig
from qwen38_jax.tree import Tree

Array = jax.Array


@struct.dataclass
class ContextCache:
    """Keys and values of the latest committed rows, for each sequence a ring in which position p is at slot p % W.

    W is the sliding window: one row more than any block sees, for a size that is a power of two where the window is.

    k, v: `[layers, B, W, kv_heads, D]`, keys normalised and rotated. positions: `[B, W]` int32, the position of each
    slot's row, -1 where there is none: such a slot is not read, whatever it holds.
    """

    k: Array
    v: Array
    positions: Array


@struct.dataclass
class DFlash2:
    """The drafter as the decode step sees it (`interface.Drafter`); its state is a `ContextCache`.

    truncate: whether sampled drafts keep to the request's top-k and top-p, as the target does. The drafter's authors do
    not truncate; either way the text has the target's distribution.
    """

    params: DFlash2Params
    cfg: DFlash2Config = struct.field(pytree_node=False)
    truncate: bool = struct.field(pytree_node=False, default=True)

    name = "dflash2"

    @property
    def draft_tokens(self) -> int:
        return self.cfg.block_size - 1

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.cfg.target_layer_ids

    def init(self, cfg: ModelConfig, sizes: StateConfig) -> ContextCache:
        """Raises ValueError where the drafter is not one for this target."""
        self.cfg.check_target(cfg)
        return init_context(self.cfg, sizes.batch)

    def propose(
        self, params: Params, cfg: ModelConfig, context: DraftContext, state: ContextCache
    ) -> tuple[Proposal, ContextCache]:
        batch, drafts = context.anchor.shape[0], self.draft_tokens
        lattice = self._lattice(params, context, state)
        positions = context.position[:, None] + 1 + jnp.arange(drafts)
        chosen, log_q = walk(lattice, context.sampler, positions, self.truncate)
        shape = (batch, drafts)
        proposal = Proposal(
            tokens=jnp.take_along_axis(lattice.ids, chosen[..., None], axis=2)[..., 0],
            candidates=lattice.ids,
            log_q=log_q,
            point_mass=jnp.zeros(shape, bool),
            valid=jnp.ones(shape, bool),
            source=jnp.full(shape, DFLASH2, jnp.int32),
        )
        return proposal, state

    def propose_tree(
        self, params: Params, cfg: ModelConfig, context: DraftContext, state: ContextCache, tree: Tree
    ) -> tuple[Proposal, ContextCache]:
        """The drafts of a tree out of one block: those that follow a row are the candidates that score best after it.

        Raises ValueError where the tree is deeper than the block or wider than the candidates.
        """
        if tree.depth > self.draft_tokens or tree.ranks > self.cfg.selector_top_k:
            raise ValueError(
                f"the drafter has {self.cfg.selector_top_k} candidates in each of {self.draft_tokens} places, "
                f"the tree wants {tree.ranks} in {tree.depth}"
            )
        lattice = self._lattice(params, context, state)
        tokens = tree_walk(lattice, tree)
        return point_masses(tokens, jnp.ones(tokens.shape, bool), DFLASH2), state

    def _lattice(self, params: Params, context: DraftContext, state: ContextCache) -> Lattice:
        masks = jnp.full((context.anchor.shape[0], self.draft_tokens), self.cfg.mask_token_id, jnp.int32)
        block = embed(params.embed, jnp.concatenate([context.anchor[:, None], masks], axis=1))
        hidden = block_hidden(self.params, self.cfg, state, block, context.position)[:, 1:]
        return make_lattice(
            self.params.selector,
            hidden,
            logits(params, hidden),
            context.anchor,
            count=self.cfg.selector_top_k,
            real_vocab_size=context.sampler.real_vocab_size,
        )

    def observe(self, params: Params, cfg: ModelConfig, rows: Observed, state: ContextCache) -> ContextCache:
        return extend_context(self.params, self.cfg, state, rows.taps, rows.positions, rows.valid)


def abstract_context(cfg: DFlash2Config, batch: int) -> ContextCache:
    """The cache as `jax.ShapeDtypeStruct` leaves."""
    rows = (batch, cfg.sliding_window)
    pool = jax.ShapeDtypeStruct(
        (cfg.num_hidden_layers, *rows, cfg.num_key_value_heads, cfg.head_dim), jnp.dtype(cfg.dtype)
    )
    return ContextCache(k=pool, v=pool, positions=jax.ShapeDtypeStruct(rows, jnp.int32))


def init_context(cfg: DFlash2Config, batch: int) -> ContextCache:
    """The cache of sequences of which no row has been observed."""
    context = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract_context(cfg, batch))
    return context.replace(positions=jnp.full_like(context.positions, -1))


def context_features(params: DFlash2Params, cfg: DFlash2Config, taps: Array) -> Array:
    """What all layers read of committed rows, `[B, L, H]`.

    taps: `[len(cfg.target_layer_ids), B, L, H]`, the target's residual stream after these layers, in this order.
    """
    batch, n = taps.shape[1:3]
    features = jnp.moveaxis(taps, 0, 2).reshape(batch, n, -1).astype(cfg.dtype)
    return plain_rms_norm(linear(features, params.fc), params.hidden_norm, cfg.rms_norm_eps)


def extend_context(
    params: DFlash2Params, cfg: DFlash2Config, context: ContextCache, taps: Array, positions: Array, keep: Array
) -> ContextCache:
    """Adds rows that the target has committed: of a prefill chunk, or of a verify block those that were accepted.

    A row that is not finite is left out: in the cache it would spoil every draft for as long as the window holds it.
    Rows of the cache at or behind the first that is added are of another text, and forgotten.

    Args:
      taps: as for `context_features`; the values of rows that are not kept do not matter.
      positions: `[B, L]` int32, absolute; no two rows that are kept share one.
      keep: `[B, L]` bool.
    """
    with jax.named_scope("dflash2_context"):
        features = context_features(params, cfg, taps)
        rope = text_rope_table(positions, cfg.head_dim, cfg.rope_theta)

        def keys_values(i):
            return _keys_values(layer_at(params.layers.attention, i), cfg, features, rope)

        k, v = lax.map(keys_values, jnp.arange(cfg.num_hidden_layers))
        size = context.positions.shape[1]
        oldest = jnp.min(jnp.where(keep, positions, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        held = jnp.where(context.positions < oldest, context.positions, -1)
        keep = keep & jnp.all(jnp.isfinite(features), axis=-1)
        newest = jnp.max(jnp.where(keep, positions, -1), axis=1, keepdims=True)
        # Of a chunk longer than the ring only the end is written: no order is defined for writes to one slot.
        slots = jnp.where(keep & (positions > newest - size), positions % size, size)
        sequence = jnp.arange(positions.shape[0])[:, None]
        return ContextCache(
            k=context.k.at[:, sequence, slots].set(k, mode="drop"),
            v=context.v.at[:, sequence, slots].set(v, mode="drop"),
            positions=held.at[sequence, slots].set(positions, mode="drop"),
        )


def block_hidden(params: DFlash2Params, cfg: DFlash2Config, context: ContextCache, x: Array, start: Array) -> Array:
    """Runs blocks on top of the context.

    Args:
      x: `[B, block, H]`, the target's embeddings of anchor and masks.
      start: `[B]` int32, the anchor's position; the context is read below it.

    Returns:
      `[B, block, H]` after the final norm, for the head and the selector. Row i predicts position start + i; the
      anchor's row predicts nothing.
    """
    with jax.named_scope("dflash2_block"):
        # Beyond the last position that the drafter knows, rows share it; their drafts are cut off by the context limit.
        positions = jnp.minimum(start[:, None] + jnp.arange(x.shape[1]), cfg.max_position_embeddings - 1)
        rope = text_rope_table(positions, cfg.head_dim, cfg.rope_theta)
        masks = block_masks(cfg, context, positions, start)

        def layer(x, i_k_v):
            i, k, v = i_k_v
            return _layer(layer_at(params.layers, i), cfg, x, rope, k, v, masks), None

        layers = jnp.arange(cfg.num_hidden_layers)
        x, _ = lax.scan(layer, x.astype(cfg.dtype), (layers, context.k, context.v))
        return plain_rms_norm(x, params.norm, cfg.rms_norm_eps)


def block_masks(cfg: DFlash2Config, context: ContextCache, positions: Array, start: Array) -> tuple[Array, Array]:
    """What the rows at `positions [B, block]` see: context rows `[B, block, W]`, rows of the block `[B, block, block]`.

    The window is symmetric: a row sees what is less than W positions away on either side.
    """

    def near(other):
        return jnp.abs(positions[:, :, None] - other[:, None, :]) < cfg.sliding_window

    written = (context.positions >= 0) & (context.positions < start[:, None])
    return near(context.positions) & written[:, None, :], near(positions)


def _layer(
    layer: DFlash2Layer, cfg: DFlash2Config, x: Array, rope: RopeTable, k: Array, v: Array, masks: tuple[Array, Array]
) -> Array:
    """One layer on a block `x [B, block, H]`; k, v `[B, W, kv_heads, D]` are the context's."""
    h = plain_rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
    x = x + _between_convs(
        layer.attention_conv, cfg, h, lambda h: block_attention(layer.attention, cfg, h, rope, k, v, masks)
    )
    h = plain_rms_norm(x, layer.post_norm, cfg.rms_norm_eps)
    return x + _between_convs(layer.mlp_conv, cfg, h, lambda h: mlp(layer.mlp, h))


def _between_convs(conv: BlockConv | None, cfg: DFlash2Config, h: Array, sublayer: Callable[[Array], Array]) -> Array:
    """A sublayer with a convolution before and one after it; the kernels of both depend on the row of `h`."""
    if conv is None:
        return sublayer(h)
    kernels = conv_kernels(conv, cfg, h)
    return block_conv(sublayer(block_conv(h, kernels[:, :, 0])), kernels[:, :, 1])


def conv_kernels(conv: BlockConv, cfg: DFlash2Config, h: Array) -> Array:
    """fp32 `[B, block, 2 (before, after), taps, H]`: `base` plus what each row of `h [B, block, H]` asks for.

    The second part is shared by the channels of a group, which lie side by side.
    """
    _, taps, channels = conv.base.shape
    change = linear(h, conv.projection, jnp.float32)
    change = change.reshape(*h.shape[:2], 2, taps, channels // cfg.conv_group_size)
    return conv.base.astype(jnp.float32) + jnp.repeat(change, cfg.conv_group_size, axis=-1)


def block_conv(x: Array, kernels: Array) -> Array:
    """Row i becomes the sum of `kernels[i, t] * x[i - t]` over the taps t; in front of the anchor there is nothing.

    x: `[B, block, H]`; kernels: fp32 `[B, block, taps, H]`.
    """
    n = x.shape[1]
    x32 = x.astype(jnp.float32)
    earlier = [jnp.pad(x32, ((0, 0), (t, 0), (0, 0)))[:, :n] for t in range(kernels.shape[2])]
    return sum(kernels[:, :, t] * rows for t, rows in enumerate(earlier)).astype(x.dtype)


def block_attention(
    layer: BlockAttention, cfg: DFlash2Config, x: Array, rope: RopeTable, k: Array, v: Array, masks: tuple[Array, Array]
) -> Array:
    """Attention of a block `x [B, block, H]` to the context's `k, v [B, W, kv_heads, D]` and to itself."""
    batch, n, _ = x.shape
    q = linear(x, layer.q).reshape(batch, n, cfg.num_attention_heads, cfg.head_dim)
    q = apply_rope(plain_rms_norm(q, layer.q_norm, cfg.rms_norm_eps), rope)
    q = group_queries(q, cfg.num_key_value_heads)
    sees_context, sees_block = (mask[:, None, None] for mask in masks)
    of_context = partial_attention(q, k, v, sees_context)
    of_block = partial_attention(q, *_keys_values(layer, cfg, x, rope), sees_block)
    attended = normalise(merge(of_context, of_block))
    return linear(attended.reshape(batch, n, -1).astype(x.dtype), layer.o)


def _keys_values(layer: BlockAttention, cfg: DFlash2Config, x: Array, rope: RopeTable) -> tuple[Array, Array]:
    """Keys, normalised and rotated, and values of `x [B, L, H]`: each `[B, L, kv_heads, D]`."""
    shape = (*x.shape[:2], cfg.num_key_value_heads, cfg.head_dim)
    k, v = (t.reshape(shape) for t in jnp.split(linear(x, layer.kv), 2, axis=-1))
    return apply_rope(plain_rms_norm(k, layer.k_norm, cfg.rms_norm_eps), rope), v
