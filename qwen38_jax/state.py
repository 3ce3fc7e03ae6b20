"""What a batch of sequences carries from one call of the model to the next.

A block that is verified does not change the state at once: its rows wait in `Pending` until it is known which of them
stay (`accept`), and the next call applies those while it reads the state anyway.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from qwen38_jax.block import Block
from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.attention import pages_at_once
from qwen38_jax.layers.gated_delta_net import Writes, keep_columns, keep_rows

Array = jax.Array

_LEAST_CAPACITY = 512


@struct.dataclass
class KvCache:
    """Keys (normalised, rotated) and values in pages: `[layers, pages, page, kv_heads, head_dim]`."""

    k: Array
    v: Array


@struct.dataclass
class Pending:
    """Rows of the last verify block. R is the largest block the state has room for.

    positions: `[B, R]` int32; valid: `[B, R]` bool, rows that may be accepted; path: `[B, R]` bool, rows that are.
    writes: as `gated_delta_net.Writes`, stacked `[linear layers, B, R, ...]`; k, v: `[groups, B, R, kv_heads, D]`.
    """

    positions: Array
    valid: Array
    path: Array
    writes: Writes
    k: Array
    v: Array


@struct.dataclass
class State:
    """State of B sequences.

    lengths: `[B]` int32 tokens so far, accepted rows included.
    block_table: `[B, max_pages]` int32 page of each stretch of a sequence; the number of pages where there is none.
    recurrent: `[linear layers, B, value_heads, Dk, Dv]` fp32 or fp16; conv: `[linear layers, B, width - 1, channels]`.
    pending: None when the state has no room for verify blocks.
    """

    lengths: Array
    block_table: Array
    kv: KvCache
    recurrent: Array
    conv: Array
    pending: Pending | None

    @property
    def capacity(self) -> int:
        """Tokens that the block table has room for, per sequence."""
        return self.block_table.shape[1] * self.kv.k.shape[2]


@dataclasses.dataclass(frozen=True)
class StateConfig:
    """Sizes of a state: `capacity` tokens for each of `batch` sequences, verify blocks of up to `rows` rows."""

    batch: int
    capacity: int
    rows: int = 0
    page: int = 64
    recurrent_dtype: str = "float32"

    def __post_init__(self):
        if self.recurrent_dtype not in ("float32", "float16"):
            raise ValueError(f"state dtype must be float32 or float16, got {self.recurrent_dtype!r}")
        for name, least in (("batch", 1), ("capacity", 1), ("page", 1), ("rows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def pages_per_sequence(self) -> int:
        """Rounded up to a multiple of the number that attention reads at a time, once there are more."""
        pages = -(-self.capacity // self.page)
        at_once = pages_at_once(self.page, pages)
        return -(-pages // at_once) * at_once


def abstract_state(cfg: ModelConfig, sizes: StateConfig) -> State:
    """The state as `jax.ShapeDtypeStruct` leaves."""
    batch, rows = sizes.batch, sizes.rows
    dtype = jnp.dtype(cfg.dtype)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def int32(*shape):
        return array(*shape, dtype=jnp.int32)

    kv_heads = (cfg.num_key_value_heads, cfg.head_dim)
    pages = array(cfg.num_groups, batch * sizes.pages_per_sequence, sizes.page, *kv_heads, dtype=dtype)
    layers, values = cfg.num_linear_layers, (cfg.linear_num_value_heads, cfg.linear_value_head_dim)
    keys = (cfg.linear_num_key_heads, cfg.linear_key_head_dim)
    pending = Pending(
        positions=int32(batch, rows),
        valid=array(batch, rows, dtype=jnp.bool_),
        path=array(batch, rows, dtype=jnp.bool_),
        writes=Writes(
            key=array(layers, batch, rows, *keys),
            delta=array(layers, batch, rows, *values),
            log_decay=array(layers, batch, rows, values[0]),
            columns=array(layers, batch, rows, cfg.conv_channels, dtype=dtype),
        ),
        k=array(cfg.num_groups, batch, rows, *kv_heads, dtype=dtype),
        v=array(cfg.num_groups, batch, rows, *kv_heads, dtype=dtype),
    )
    return State(
        lengths=int32(batch),
        block_table=int32(batch, sizes.pages_per_sequence),
        kv=KvCache(k=pages, v=pages),
        recurrent=array(layers, batch, values[0], keys[1], values[1], dtype=jnp.dtype(sizes.recurrent_dtype)),
        conv=array(layers, batch, cfg.linear_conv_kernel_dim - 1, cfg.conv_channels, dtype=dtype),
        pending=pending if rows else None,
    )


def capacity_for(tokens: int) -> int:
    """Tokens to make room for where `tokens` are wanted: a power of two, so that few programs serve all lengths."""
    return max(_LEAST_CAPACITY, 1 << (tokens - 1).bit_length())


def init_state(cfg: ModelConfig, sizes: StateConfig) -> State:
    """An empty state: every sequence of length 0, with its pages side by side in the pool."""
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract_state(cfg, sizes))
    table = jnp.arange(state.block_table.size, dtype=jnp.int32).reshape(state.block_table.shape)
    return state.replace(block_table=table)


def check_block(cfg: ModelConfig, block: Block, state: State) -> None:
    """Checks what a compiled program cannot: there a bad id is clamped, a negative one wraps, and all looks well.

    Waits for the device; `forward` calls it whenever it is not being traced.

    Raises:
      ValueError: a valid row has a token outside the vocabulary, or a position without a page; a page id is outside
        the pool; a parent is not an earlier row.
    """
    block, table = jax.device_get((block, state.block_table))
    valid = block.valid
    pages, page = state.kv.k.shape[1:3]
    _within("token id", block.tokens[valid], cfg.vocab_size)
    _within("position", block.positions[valid], state.capacity)
    _within("page id (the number of pages means none)", table, pages + 1)
    unassigned = np.take_along_axis(table, np.clip(block.positions // page, 0, table.shape[1] - 1), axis=1) == pages
    if (unassigned & valid).any():
        raise ValueError(f"position {block.positions[unassigned & valid][0]} has no page in the block table")
    if block.parents is not None:
        rows = np.broadcast_to(np.arange(valid.shape[1]), valid.shape)
        _within("parent + 1 (an earlier row + 1, or 0)", (block.parents + 1)[valid], rows[valid] + 1)
        if (~np.take_along_axis(valid, np.maximum(block.parents, 0), axis=1) & valid & (block.parents >= 0)).any():
            raise ValueError("a valid row follows a row of padding")
    elif (np.abs(np.diff(np.pad(valid, ((0, 0), (1, 1))).astype(int), axis=1)).sum(axis=1) > 2).any():
        raise ValueError("padding lies between the valid rows of a chain; it may only be on either side")


def _within(name: str, values: np.ndarray, bound: np.ndarray | int) -> None:
    outside = (values < 0) | (values >= bound)
    if outside.any():
        limit = np.broadcast_to(bound, values.shape)[outside][0]
        raise ValueError(f"{name} {values[outside][0]} is not in [0, {limit - 1}]")


def accept(state: State, n: Array) -> State:
    """Keeps the first `n [B]` valid rows of the pending chain, all of them where n is more; the next call writes them.

    A block is accepted once: afterwards, as after a committed call, there is nothing to accept.
    """
    return accept_path(state, jnp.cumsum(state.pending.valid, axis=1) <= n[:, None])


def accept_path(state: State, path: Array) -> State:
    """Keeps the pending rows of `path [B, R]`: a row, its parent, and so on to the root. Padding is never kept."""
    path = path & state.pending.valid
    pending = state.pending.replace(path=state.pending.path | path, valid=jnp.zeros_like(path))
    return state.replace(lengths=state.lengths + jnp.sum(path, axis=1, dtype=jnp.int32), pending=pending)


def settled_recurrent(state: State, layer: Array | int) -> Array:
    """Recurrent state (fp32) of one linear layer with the accepted rows applied.

    It passes through its storage type, so that a block sees the same value as after `flush`.
    """
    recurrent = state.recurrent[layer].astype(jnp.float32)
    if state.pending is not None:
        writes = jax.tree.map(lambda t: t[layer], state.pending.writes)
        recurrent = keep_rows(recurrent, writes, state.pending.path).astype(state.recurrent.dtype)
    return recurrent.astype(jnp.float32)


def settled_window(state: State, layer: Array | int) -> Array:
    """Convolution window of one linear layer with the accepted rows applied."""
    window, pending = state.conv[layer], state.pending
    return window if pending is None else keep_columns(window, pending.writes.columns[layer], pending.path)


def settled_full(state: State, layer: Array | int) -> KvCache:
    """The whole KV pool with one layer's accepted rows written."""
    if state.pending is None:
        return state.kv
    pending = state.pending
    k, v = pending.k[layer], pending.v[layer]
    return write_rows(state.kv, layer, state.block_table, k, v, pending.positions, pending.path)


def write_rows(
    kv: KvCache, layer: Array | int, block_table: Array, k: Array, v: Array, positions: Array, keep: Array
) -> KvCache:
    """Writes the rows `k, v [B, L, kv_heads, D]` that `keep [B, L]` names to their `positions [B, L]`.

    A row without a page is dropped: an out-of-range page, never a negative one, which would wrap.
    """
    pages, page = kv.k.shape[1:3]
    slot = positions // page
    ids = jnp.take_along_axis(block_table, jnp.clip(slot, 0, block_table.shape[1] - 1), axis=1)
    ids = jnp.where(keep & (slot < block_table.shape[1]), ids, pages)
    place = (layer, ids, positions % page)
    return KvCache(
        k=kv.k.at[place].set(k.astype(kv.k.dtype), mode="drop"),
        v=kv.v.at[place].set(v.astype(kv.v.dtype), mode="drop"),
    )


def flush(state: State) -> State:
    """Applies the accepted rows in every layer: for a state that must be at rest, as before a snapshot."""
    if state.pending is None:
        return state

    def linear(i, state):
        recurrent = settled_recurrent(state, i).astype(state.recurrent.dtype)
        return state.replace(
            recurrent=state.recurrent.at[i].set(recurrent), conv=state.conv.at[i].set(settled_window(state, i))
        )

    state = lax.fori_loop(0, state.recurrent.shape[0], linear, state)
    state = lax.fori_loop(0, state.kv.k.shape[0], lambda i, s: s.replace(kv=settled_full(s, i)), state)
    return state.replace(pending=nothing_pending(state.pending))


def nothing_pending(pending: Pending) -> Pending:
    """The same buffers with no row accepted and none to accept."""
    nothing = jnp.zeros_like(pending.path)
    return pending.replace(path=nothing, valid=nothing)
