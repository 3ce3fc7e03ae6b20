"""Attention of a short block of rows over a paged cache and over the block itself, split over the keys.

    o[i] = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j

One program reads one stretch of a sequence's pages for one key head and all the rows that share it: with a handful of
rows, too few for a program each, the keys have to be what is divided. Every program leaves a sum that is not yet
normalised, and the largest score it saw; a second kernel adds them up, weighted by the exponentials of those (Dao et
al., "Flash-Decoding", 2023). Partial sums stay fp32.
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
    LOWEST,
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

MAX_ROWS = 64  # of a block
_MERGED_AT_ONCE = 16  # partial sums of a row


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut up.

    rows: of queries a program holds, a power of two from 16 on.
    keys: read at a time, a power of two from 16 on that divides the page.
    splits: of a sequence.
    """

    rows: int
    keys: int
    splits: int
    warps: int = 4
    stages: int = 2


def heuristics(shape: tuple[int, int, int, int], max_tokens: int, page: int, device: Device) -> Config:
    """A `Config` for `(sequences, key heads, rows of queries a key head, D)` and the longest sequence there can be.

    As many programs as fill the device once, but no split of fewer than 64 tokens.
    """
    batch, kv_heads, queries, dim = shape
    hopper = device.compute_capability >= (9, 0)
    rows = min(128 if hopper else 64, max(16, 1 << (queries - 1).bit_length()))
    programs = batch * kv_heads * -(-queries // rows)
    splits = min(max(1, device.cores // programs), max(1, max_tokens // 64))
    # From three stages on a tile is on its way while another is worked on; the 3090 has no room for three of 32 keys.
    large = rows * dim >= 64 * 256
    keys, stages = (16, 4) if large and not hopper else (32, 3)
    return Config(rows, math.gcd(keys, page), splits, warps=8 if large else 4, stages=stages)


def verify_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    cache: PagedCache,
    layer: Array | int,
    block_table: Array,
    lengths: Array,
    *,
    positions: Array | None = None,
    window: int | None = None,
    out_dtype=None,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """Attention of `L` rows of each of `B` sequences over their committed tokens and over each other.

    Query head h reads key head `h // (heads / kv_heads)`. What no row may read, in the cache or in the block, may hold
    anything. A row that may read nothing is zero.

    Args:
      q: bf16, fp16 or, slowly, fp32 `[B, L, heads, D]`; k, v: of the same dtype `[B, L, kv_heads, D]`, the rows' own,
        which are not read from the cache, whether they are in it or not.
      mask: bool `[B, L, L]`, whether row i reads row j of the block: causal, ancestors in a tree, all, or any other.
      cache: of `layers`; layer: an int32 scalar that a loop may count.
      block_table: int32 `[B, max_pages]`, the page of each stretch of a sequence; past its length anything.
      lengths: int32 `[B]`, committed tokens, all of which every row reads, but for the window.
      positions: int32 `[B, L]` of the rows, needed for the window alone.
      window: a row reads only tokens at positions greater than its own minus this. (Within the block `mask` says.)
      out_dtype: of the result; default `q.dtype`.
      config: default `heuristics` of the current device.
      interpret: see `kernel_call`.

    Returns:
      `[B, L, heads, D]`.

    Raises:
      ValueError: shapes, dtypes, window or config do not fit each other.
    """
    _check(q, k, v, mask, cache, block_table, lengths, positions, window)
    batch, n, heads, dim = q.shape
    kv_heads, page = k.shape[2], cache.k.shape[2]
    group = heads // kv_heads
    capacity = block_table.shape[1] * page
    config = config or heuristics((batch, kv_heads, n * group, dim), capacity, page, current_device())
    check_keys(config.keys, page)
    padded = -(-n * group // config.rows) * config.rows
    kernel = functools.partial(
        _split_kernel,
        config=config,
        scale=dim**-0.5 * LOG2_E,
        window=window,
        scaled=cache.k_scale is not None,
    )
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    operands = [layer, block_table, lengths, q, k, v, mask, cache.k, cache.v, *cache.scales]
    if window is not None:
        operands += [jnp.clip(jnp.min(positions, axis=1) - window + 1, 0, lengths), positions]
    numbers = jax.ShapeDtypeStruct((batch, kv_heads, padded, config.splits), jnp.float32)
    partial = kernel_call(
        kernel,
        operands,
        [jax.ShapeDtypeStruct((*numbers.shape, dim), jnp.float32), numbers, numbers],
        name="verify_attention",
        grid=(padded // config.rows, config.splits, batch * kv_heads),
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
    )
    return kernel_call(
        functools.partial(_merge_kernel, group=group, splits=config.splits),
        partial,
        jax.ShapeDtypeStruct(q.shape, out_dtype or q.dtype),
        name="merge_attention",
        grid=(n * group, kv_heads, batch),
        num_warps=4,
        interpret=interpret,
    )


def _split_kernel(
    layer_ref,
    table_ref,
    lengths_ref,
    q_ref,
    own_k_ref,
    own_v_ref,
    mask_ref,
    k_ref,
    v_ref,
    *refs,
    config: Config,
    scale: float,
    window: int | None,
    scaled: bool,
):
    """Some rows of queries over one stretch of keys; the first stretch has the block's own keys too.

    A row of queries is one head of a row of the block: all that read the same key head, row by row.
    """
    *extra_refs, out_ref, top_ref, total_ref = refs
    k_scale_ref, v_scale_ref = extra_refs[:2] if scaled else (None, None)
    starts_ref, positions_ref = extra_refs[-2:] if window is not None else (None, None)
    rows, keys, splits = config.rows, config.keys, config.splits
    (n, heads, dim), kv_heads = q_ref.shape[1:], k_ref.shape[3]
    group = heads // kv_heads
    first, split, sequence = pl.program_id(0) * rows, pl.program_id(1), lax.div(pl.program_id(2), kv_heads)
    head = lax.rem(pl.program_id(2), kv_heads)
    layer, length = layer_ref[0], lengths_ref[sequence]
    query = first + lax.iota(jnp.int32, rows)
    row, real, column = lax.div(query, group), query < n * group, lax.broadcasted_iota(jnp.int32, (1, dim), 1)
    place = (sequence, row[:, None], (head * group + lax.rem(query, group))[:, None], column)
    q = triton.load(q_ref.at[place], mask=jnp.broadcast_to(real[:, None], (rows, dim)), other=0)

    def own(carry):
        key = lax.iota(jnp.int32, max(16, 1 << (n - 1).bit_length()))
        place = (sequence, key[:, None], head, column)
        exists = jnp.broadcast_to((key < n)[:, None], (len(key), dim))
        k, v = (triton.load(ref.at[place], mask=exists, other=0) for ref in (own_k_ref, own_v_ref))
        both = real[:, None] & (key < n)[None, :]
        readable = triton.load(mask_ref.at[sequence, row[:, None], key[None, :]], mask=both, other=False)
        # Of what nobody reads not even NaN may remain: zero times NaN is NaN.
        seen = jnp.max(readable.astype(jnp.int32), axis=0) > 0
        return add_keys(carry, q, k, jnp.where(seen[:, None], v, 0), scale, 1.0, readable)

    begin_tile, oldest = 0, None
    if window is not None:
        begin_tile = lax.div(starts_ref[sequence], keys)
        oldest = triton.load(positions_ref.at[sequence, row], mask=real, other=0) - (window - 1)
    tiles = lax.div(length + (keys - 1), keys) - begin_tile
    begin = begin_tile + lax.div(tiles * split, splits)
    end = begin_tile + lax.div(tiles * (split + 1), splits)

    def read(tile, tokens_of_page, carry):
        place = (layer, *tokens_of_page, head)
        tokens = tile * keys + lax.iota(jnp.int32, keys)
        exists = tokens < length
        k = triton.load(k_ref.at[(*place, slice(None))])
        # Memory that nothing has written may hold NaN, which a weight of zero would not remove.
        v = triton.load(v_ref.at[(*place, slice(None))], mask=jnp.broadcast_to(exists[:, None], (keys, dim)), other=0)
        readable = exists[None, :]
        if window is not None:
            readable = readable & (tokens[None, :] >= oldest[:, None])
        key_scale, value_scale = scale, 1.0
        if scaled:
            key_scale = scale * triton.load(k_scale_ref.at[place])[None, :]
            value_scale = triton.load(v_scale_ref.at[place], mask=exists, other=0.0)[None, :]
        return add_keys(carry, q, k, v, key_scale, value_scale, jnp.broadcast_to(readable, (rows, keys)))

    carry = lax.cond(split == 0, own, lambda carry: carry, nothing_read(rows, dim))
    out, top, total = for_each_tile(
        begin, end, read, carry, table_ref=table_ref, pool_ref=k_ref, sequence=sequence, keys=keys
    )

    place = (sequence, head, pl.ds(first, rows), split)
    triton.store(out_ref.at[(*place, slice(None))], out, mask=jnp.broadcast_to(real[:, None], (rows, dim)))
    triton.store(top_ref.at[place], top, mask=real)
    triton.store(total_ref.at[place], total, mask=real)


def _merge_kernel(partial_ref, top_ref, total_ref, out_ref, *, group: int, splits: int):
    """One row of one head."""
    row, head, sequence = (pl.program_id(axis) for axis in range(3))
    dim = out_ref.shape[-1]
    padded = 1 << (splits - 1).bit_length()
    split = lax.iota(jnp.int32, padded)
    top = triton.load(top_ref.at[sequence, head, row, split], mask=split < splits, other=LOWEST)
    total = triton.load(total_ref.at[sequence, head, row, split], mask=split < splits, other=0.0)
    highest = jnp.max(top)
    norm = jnp.sum(total * jnp.exp2(top - highest))

    def add(i, out):
        split = i * count + lax.iota(jnp.int32, count)
        top = triton.load(top_ref.at[sequence, head, row, split], mask=split < splits, other=LOWEST)
        place = partial_ref.at[sequence, head, row, split[:, None], lax.broadcasted_iota(jnp.int32, (1, dim), 1)]
        mask = jnp.broadcast_to((split < splits)[:, None], (count, dim))
        partial = triton.load(place, mask=mask, other=0.0)
        return out + jnp.sum(partial * jnp.exp2(top - highest)[:, None], axis=0)

    count = min(_MERGED_AT_ONCE, padded)
    out = lax.fori_loop(0, padded // count, add, jnp.zeros((dim,), jnp.float32))
    out = jnp.where(norm > 0, out / jnp.where(norm > 0, norm, 1.0), 0.0)
    place = out_ref.at[sequence, lax.div(row, group), head * group + lax.rem(row, group), :]
    triton.store(place, out.astype(out_ref.dtype))


def verify_attention_reference(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    cache: PagedCache,
    layer: Array | int,
    block_table: Array,
    lengths: Array,
    *,
    positions: Array | None = None,
    window: int | None = None,
    out_dtype=None,
) -> Array:
    """What `verify_attention` must equal, in fp32."""
    batch, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    keys, values = (
        jnp.concatenate([read_pages(pool, scale, layer, block_table), own.astype(jnp.float32)], axis=1)
        for pool, scale, own in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v))
    )
    capacity = keys.shape[1] - n
    readable = jnp.broadcast_to(jnp.arange(capacity) < lengths[:, None, None], (batch, n, capacity))
    if window is not None:
        readable = readable & (jnp.arange(capacity) > positions[..., None] - window)
    readable = jnp.concatenate([readable, mask], axis=2)[:, None, None]  # [B, 1, 1, L, keys]
    queries = q.reshape(batch, n, kv_heads, -1, dim).astype(jnp.float32)
    scores = jnp.einsum("blgrd,bsgd->bgrls", queries, keys, precision=HIGHEST) * dim**-0.5
    scores = jnp.where(readable, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST)
    weights = jnp.where(readable, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    values = jnp.where(jnp.any(readable, axis=(1, 2, 3))[..., None, None], values, 0.0)
    out = jnp.einsum("bgrls,bsgd->blgrd", weights, values, precision=HIGHEST)
    return out.reshape(q.shape).astype(out_dtype or q.dtype)


def _check(q, k, v, mask, cache, block_table, lengths, positions, window) -> None:
    check_cache(cache, q, block_table)
    batch, n, _, dim = q.shape
    kv_heads = cache.k.shape[3]
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"q must have 1 to {MAX_ROWS} rows, got {n}")
    own = (batch, n, kv_heads, dim)
    if k.shape != own or v.shape != own or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"k and v must be {q.dtype}{list(own)} for this q, got {k.dtype}{list(k.shape)}, {v.dtype}{list(v.shape)}"
        )
    if mask.shape != (batch, n, n) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be bool{[batch, n, n]}, got {mask.dtype}{list(mask.shape)}")
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must be [{batch}], got {list(lengths.shape)}")
    if (window is None) != (positions is None) or (window is not None and window < 1):
        raise ValueError(f"a window, of at least 1, and positions go together; got window {window}")
    if positions is not None and positions.shape != (batch, n):
        raise ValueError(f"positions must be {[batch, n]}, got {list(positions.shape)}")
