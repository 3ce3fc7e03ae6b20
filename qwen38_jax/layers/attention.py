"""Gated full attention over a paged cache and over the rows of the block itself."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.norm_rope import split_norm_rope
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.verify_attention import MAX_ROWS, PagedCache, verify_attention
from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.kernels import takes_kernels
from qwen38_jax.layers.linear import linear, precision_for
from qwen38_jax.layers.norm import rms_norm
from qwen38_jax.layers.rope import RopeTable, apply_rope
from qwen38_jax.params import Attention

Array = jax.Array

# Tokens of context read at a time; bounds the score matrix at [B, heads, L, this].
_CONTEXT_TOKENS = 512


def pages_at_once(page: int, max_pages: int) -> int:
    """How many pages of `page` tokens are read at a time. A block table must have a multiple of it."""
    return min(max(_CONTEXT_TOKENS // page, 1), max_pages)


class Rows(NamedTuple):
    """Projections of a block. `q [B, L, heads, D]`, `gate [B, L, heads * D]`, `k` and `v [B, L, kv_heads, D]`."""

    q: Array
    gate: Array
    k: Array
    v: Array


class Partial(NamedTuple):
    """Softmax attention over some of the keys, not yet normalised; fp32. `r` query heads share a key head.

    out: `[B, kv_heads, r, L, D]` sum of exp(score - top) * v; top, total: `[B, kv_heads, r, L]`.
    """

    out: Array
    top: Array
    total: Array


class Context(NamedTuple):
    """Committed keys and values of one layer in a paged pool.

    k, v: `[layers, pages, page, kv_heads, D]`; layer: index into them; block_table: `[B, max_pages]` int32 page ids
    (out of range where no page is assigned); lengths: `[B]` tokens to read. written: `[B, L]` int32, the positions at
    which the rows of the block are in the pool, too, behind the tokens to read; -1 for padding. None: they are not.
    """

    k: Array
    v: Array
    layer: Array | int
    block_table: Array
    lengths: Array
    written: Array | None = None


def project(layer: Attention, cfg: ModelConfig, x: Array, rope: RopeTable, kernels: str = "off") -> Rows:
    """Queries, gates, keys and values of `x [B, L, hidden]`; queries and keys normalised, then rotated.

    `kernels`: see `ModelConfig`. They have no gradient.
    """
    batch, n, _ = x.shape
    heads, kv_heads, dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    qkv = linear(x, layer.qkv)
    q_gate, k, v = jnp.split(qkv, [2 * heads * dim, (2 * heads + kv_heads) * dim], axis=-1)
    q, gate = jnp.split(q_gate.reshape(batch, n, heads, 2 * dim), 2, axis=-1)
    gate = gate.reshape(batch, n, -1)
    if _power_of_two(dim) and takes_kernels(kernels, qkv.dtype):
        qkv, cos, sin = (t.reshape(batch * n, -1) for t in (qkv, rope.cos, rope.sin))
        sizes = dict(heads=heads, kv_heads=kv_heads, eps=cfg.rms_norm_eps)
        rows = split_norm_rope(qkv, layer.q_norm, layer.k_norm, cos, sin, **sizes, interpret=kernels == "interpret")
        q, k, v = (t.reshape(batch, n, -1, dim) for t in rows)
        return Rows(q, gate, k, v)
    k, v = (t.reshape(batch, n, kv_heads, dim) for t in (k, v))
    q = apply_rope(rms_norm(q, layer.q_norm, cfg.rms_norm_eps), rope)
    k = apply_rope(rms_norm(k, layer.k_norm, cfg.rms_norm_eps), rope)
    return Rows(q, gate, k, v)


def output(layer: Attention, rows: Rows, attended: Array) -> Array:
    """Gates `attended [B, L, heads, D]` with a sigmoid and projects it: `[B, L, hidden]`."""
    gate = jax.nn.sigmoid(rows.gate.astype(jnp.float32))
    gated = attended.reshape(rows.gate.shape) * gate
    return linear(gated.astype(rows.gate.dtype), layer.o)


def attend(rows: Rows, mask: Array, context: Context | None = None, kernels: str = "off") -> Array:
    """Attention of each row over the context and over the block's rows that `mask [B, L, L]` lets it see.

    Returns fp32 `[B, L, heads, D]`; zero for a row that sees nothing. Split over the keys and merged by log-sum-exp
    (Flash-Decoding, 2023), so that memory does not grow with the context. `kernels`: see `ModelConfig`.
    """
    if context is not None and _has_kernel(rows, context, kernels):
        return _attend_by_kernel(rows, mask, context, kernels == "interpret")
    q = group_queries(rows.q, rows.k.shape[2])
    partial = partial_attention(q, rows.k, rows.v, mask[:, None, None])
    if context is not None:
        partial = merge(partial, _attend_context(q, context))
    return normalise(partial)


def _has_kernel(rows: Rows, context: Context, kernels: str) -> bool:
    """Triton's blocks are powers of two, and tensor cores multiply by the 16: other heads and pages do without."""
    (n, _, dim), page = rows.q.shape[1:], context.k.shape[2]
    fits = dim >= 16 and _power_of_two(dim) and page % 16 == 0 and (n <= MAX_ROWS or context.written is not None)
    return fits and takes_kernels(kernels, rows.q.dtype)


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _attend_by_kernel(rows: Rows, mask: Array, context: Context, interpret: bool) -> Array:
    cache = PagedCache(context.k, context.v)
    where, how = (context.layer, context.block_table), dict(out_dtype=jnp.float32, interpret=interpret)
    if rows.q.shape[1] <= MAX_ROWS:
        return verify_attention(rows.q, rows.k, rows.v, mask, cache, *where, context.lengths, **how)
    return prefill_attention(rows.q, cache, *where, context.written, **how)


def partial_attention(q: Array, k: Array, v: Array, mask: Array) -> Partial:
    """`q [B, kv_heads, r, L, D]` over `k, v [B, S, kv_heads, D]` where `mask` (broadcast to the scores) is true."""
    scores = jnp.einsum("bgrld,bsgd->bgrls", q, k, precision=precision_for(q), preferred_element_type=jnp.float32) * (
        q.shape[-1] ** -0.5
    )
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1), jnp.finfo(jnp.float32).min)
    p = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    # A masked row of v may be memory that nothing has written; zero times NaN would be NaN.
    seen = jnp.any(mask, axis=(1, 2, 3))  # [B, S]
    v = jnp.where(seen[..., None, None], v, 0)
    out = jnp.einsum(
        "bgrls,bsgd->bgrld", p.astype(v.dtype), v, precision=precision_for(v), preferred_element_type=jnp.float32
    )
    return Partial(out, top, jnp.sum(p, axis=-1))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    top = jnp.maximum(a.top, b.top)
    wa, wb = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Partial(out=a.out * wa[..., None] + b.out * wb[..., None], top=top, total=a.total * wa + b.total * wb)


def normalise(partial: Partial) -> Array:
    """The attention that `partial` stands for, fp32 `[B, L, heads, D]`; zero for a row that sees nothing."""
    total = jnp.where(partial.total > 0, partial.total, 1.0)
    out = partial.out / total[..., None]
    batch, _, _, n, dim = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, n, -1, dim)


def group_queries(q: Array, kv_heads: int) -> Array:
    """`[B, L, heads, D] -> [B, kv_heads, heads / kv_heads, L, D]`; query head h reads key head h // r."""
    batch, n, heads, dim = q.shape
    return q.reshape(batch, n, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def _attend_context(q: Array, context: Context) -> Partial:
    """Attention over the committed tokens, a few pages at a time, as many as the longest sequence needs."""
    page = context.k.shape[2]
    batch, max_pages = context.block_table.shape
    pages = pages_at_once(page, max_pages)
    if max_pages % pages:
        raise ValueError(f"{max_pages} pages a sequence are not a multiple of the {pages} read at a time")
    span = pages * page

    def read(i, partial):
        ids = lax.dynamic_slice_in_dim(context.block_table, i * pages, pages, axis=1)
        k, v = (
            pool.at[context.layer, ids].get(mode="clip").reshape(batch, span, *pool.shape[3:])
            for pool in (context.k, context.v)
        )
        mask = i * span + jnp.arange(span) < context.lengths[:, None]  # [B, span]
        return merge(partial, partial_attention(q, k, v, mask[:, None, None, None]))

    shape = q.shape[:-1]
    empty = Partial(
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(shape, jnp.finfo(jnp.float32).min),
        jnp.zeros(shape, jnp.float32),
    )
    steps = (jnp.max(context.lengths) + span - 1) // span
    return lax.fori_loop(0, jnp.minimum(steps, max_pages // pages), read, empty)
