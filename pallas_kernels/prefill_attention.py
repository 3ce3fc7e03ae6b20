"""Attention of a chunk of a prompt over a paged cache that holds the chunk's own keys and values already.

    o[i] = sum_{j <= p_i} softmax_j(q_i . k_j / sqrt(D)) v_j        (p_i: the position of row i)

One program takes a tile of rows of one query head and goes through their sequence's pages, tile by tile, with a running
softmax in fp32 (Dao et al., "FlashAttention", 2022). Tiles that every row may read whole are read without a mask, and
only those at the diagonal with one. The rows at the end of a chunk read most, so their programs start first.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels._call import kernel_call
from pallas_kernels._instructions import HIGHEST
from pallas_kernels._paged_attention import (
    LOG2_E,
    PagedCache,
    add_keys,
    check_cache,
    check_keys,
    for_each_tile,
    nothing_read,
    read_pages,
)
from pallas_kernels.device import Device, current_device

Array = jax.Array

_REFERENCE_ROWS = 128  # at a time, which bounds the scores


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut up.

    rows: of a query head that a program holds, a power of two from 16 on.
    keys: read at a time, a power of two from 16 on that divides the page.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


def heuristics(dim: int, dtype, page: int, device: Device) -> Config:
    """A `Config` for heads of `dim` in a cache of `dtype`: the largest tiles that registers and shared memory hold."""
    hopper, wide, int8 = device.compute_capability >= (9, 0), dim > 128, dtype == jnp.int8
    # What is converted from int8 is in registers twice. Hopper's tensor cores read keys and values from shared memory.
    keys = 64 if (hopper and not (int8 and wide)) or not (wide or int8) else 32
    return Config(rows=128 if hopper else 64, keys=math.gcd(keys, page), warps=8 if hopper or wide else 4)


def prefill_attention(
    q: Array,
    cache: PagedCache,
    layer: Array | int,
    block_table: Array,
    positions: Array,
    *,
    out_dtype=None,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """Attention of `L` rows of each of `B` sequences to every token of theirs up to the row's own.

    Query head h reads key head `h // (heads / kv_heads)`. What no row may read may hold anything.

    Args:
      q: bf16, fp16 or, slowly, fp32 `[B, L, heads, D]`.
      cache: of `layers`; up to each row's position, the row itself included, it is written. An int8 cache is read for
        the chunk's own tokens as well: a row sees them as every later one will.
      layer: an int32 scalar that a loop may count.
      block_table: int32 `[B, max_pages]`, the page of each stretch of a sequence; past its tokens anything.
      positions: int32 `[B, L]`; -1 for a row of padding, which becomes zero. Others may differ in any way, but only
        rows that follow one another share what they read.
      out_dtype: of the result; default `q.dtype`.
      config: default `heuristics` of the current device.
      interpret: see `kernel_call`.

    Returns:
      `[B, L, heads, D]`.

    Raises:
      ValueError: shapes, dtypes or config do not fit each other.
    """
    _check(q, cache, block_table, positions)
    batch, n, heads, dim = q.shape
    page = cache.k.shape[2]
    config = config or heuristics(dim, cache.k.dtype, page, current_device())
    check_keys(config.keys, page)
    return kernel_call(
        functools.partial(_kernel, config=config, scale=dim**-0.5 * LOG2_E, scaled=cache.k_scale is not None),
        [jnp.asarray(layer, jnp.int32).reshape(1), block_table, positions, q, cache.k, cache.v, *cache.scales],
        jax.ShapeDtypeStruct(q.shape, out_dtype or q.dtype),
        name="prefill_attention",
        grid=(heads, -(-n // config.rows), batch),
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
    )


def _kernel(
    layer_ref, table_ref, positions_ref, q_ref, k_ref, v_ref, *refs, config: Config, scale: float, scaled: bool
):
    """A tile of rows of one head."""
    k_scale_ref, v_scale_ref = refs[:2] if scaled else (None, None)
    out_ref, layer = refs[-1], layer_ref[0]
    rows, keys = config.rows, config.keys
    n, heads, dim = q_ref.shape[1:]
    head, sequence = pl.program_id(0), pl.program_id(2)
    row = (-(-n // rows) - 1 - pl.program_id(1)) * rows + lax.iota(jnp.int32, rows)
    place = (sequence, row[:, None], head, lax.broadcasted_iota(jnp.int32, (1, dim), 1))
    exists = jnp.broadcast_to((row < n)[:, None], (rows, dim))
    position = triton.load(positions_ref.at[sequence, row], mask=row < n, other=-1)
    q = triton.load(q_ref.at[place], mask=exists, other=0)
    last = jnp.max(position)
    first = jnp.min(jnp.where(position < 0, last, position))

    def read(tile, tokens_of_page, carry, diagonal):
        place = (layer, *tokens_of_page, lax.div(head, heads // k_ref.shape[3]))
        tokens = tile * keys + lax.iota(jnp.int32, keys)
        written = tokens <= last
        k = triton.load(k_ref.at[(*place, slice(None))])
        # Memory that nothing has written may hold NaN, which a weight of zero would not remove.
        v = triton.load(v_ref.at[(*place, slice(None))], mask=jnp.broadcast_to(written[:, None], (keys, dim)), other=0)
        key_scale, value_scale = scale, 1.0
        if scaled:
            key_scale = scale * triton.load(k_scale_ref.at[place])[None, :]
            value_scale = triton.load(v_scale_ref.at[place], mask=written, other=0.0)[None, :]
        readable = tokens[None, :] <= position[:, None] if diagonal else None
        return add_keys(carry, q, k, v, key_scale, value_scale, readable)

    whole = lax.div(first + 1, keys)  # tiles that all rows read all of
    end = lax.div(last + keys, keys)
    loop = functools.partial(for_each_tile, table_ref=table_ref, pool_ref=k_ref, sequence=sequence, keys=keys)
    carry = loop(0, whole, functools.partial(read, diagonal=False), nothing_read(rows, dim))
    out, _, total = loop(whole, end, functools.partial(read, diagonal=True), carry)
    real = position >= 0
    out = jnp.where(real[:, None], out / jnp.where(real, total, 1.0)[:, None], 0.0)
    triton.store(out_ref.at[place], out.astype(out_ref.dtype), mask=exists)


def prefill_attention_reference(
    q: Array,
    cache: PagedCache,
    layer: Array | int,
    block_table: Array,
    positions: Array,
    *,
    out_dtype=None,
) -> Array:
    """What `prefill_attention` must equal, in fp32."""
    batch, n, heads, dim = q.shape
    k, v = (
        read_pages(pool, scale, layer, block_table)
        for pool, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    tokens = jnp.arange(k.shape[1])
    v = jnp.where((tokens <= jnp.max(positions, axis=1, keepdims=True))[..., None, None], v, 0)

    def attend(rows):
        q, positions = rows  # [B, kv_heads, r, D], [B]
        readable = (tokens <= positions[:, None])[:, None, None]  # [B, 1, 1, tokens]
        scores = jnp.einsum("bgrd,bsgd->bgrs", q, k, precision=HIGHEST) * dim**-0.5
        weights = jax.nn.softmax(scores, axis=-1, where=readable)
        return jnp.einsum("bgrs,bsgd->bgrd", weights, v, precision=HIGHEST)

    queries = q.reshape(batch, n, k.shape[2], -1, dim).swapaxes(0, 1).astype(jnp.float32)
    out = lax.map(attend, (queries, positions.T), batch_size=_REFERENCE_ROWS)
    return out.swapaxes(0, 1).reshape(q.shape).astype(out_dtype or q.dtype)


def _check(q, cache, block_table, positions) -> None:
    check_cache(cache, q, block_table)
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions must be {list(q.shape[:2])}, got {list(positions.shape)}")
