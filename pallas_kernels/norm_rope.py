"""From the fused projection of an attention layer to its queries, keys and values: split, normalised, rotated.

    y = round(x / rms(x) * (1 + w))    o_i = y_i cos_i - y_{i+r} sin_i    o_{i+r} = y_{i+r} cos_i + y_i sin_i    (i < r)

for each head of the queries and of the keys; channels from 2r on stay as they are. XLA makes six kernels of this, each
of which takes longer to launch than to move the few rows of a verify block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels._call import kernel_call

Array = jax.Array


def split_norm_rope(
    qkv: Array,
    q_norm: Array,
    k_norm: Array,
    cos: Array,
    sin: Array,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of `T` rows.

    Args:
      qkv: bf16, fp16 or fp32 `[T, (2 heads + 2 kv_heads) D]`: of each head D channels of query, then D that are left
        alone (a gate); all keys; all values. D is a power of two, `heads` a multiple of `kv_heads`.
      q_norm, k_norm: `[D]` zero-centred weights.
      cos, sin: fp32 `[T, r]`, `2 r <= D`.
      eps: added to the mean of squares.
      interpret: see `kernel_call`.

    Returns:
      `[T, heads, D]` and twice `[T, kv_heads, D]`, of the dtype of `qkv`.

    Raises:
      ValueError: the shapes do not fit each other.
    """
    rows, dim = len(qkv), q_norm.shape[0]
    _check(qkv, q_norm, k_norm, cos, sin, heads, kv_heads)
    return kernel_call(
        functools.partial(_kernel, eps=eps),
        [qkv, q_norm, k_norm, cos, sin],
        [jax.ShapeDtypeStruct((rows, n, dim), qkv.dtype) for n in (heads, kv_heads, kv_heads)],
        name="split_norm_rope",
        grid=(rows, kv_heads),
        num_warps=4,
        interpret=interpret,
    )


def _kernel(qkv_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, q_ref, k_ref, v_ref, *, eps: float):
    """One key head of a row, with the query heads that read it."""
    row, kv_head = pl.program_id(0), pl.program_id(1)
    (heads, dim), kv_heads, half = q_ref.shape[1:], k_ref.shape[1], cos_ref.shape[1]
    group = heads // kv_heads
    channel = lax.broadcasted_iota(jnp.int32, (1, dim), 1)
    lower, rotated = channel < half, channel < 2 * half
    partner = jnp.where(lower, channel + half, jnp.where(rotated, channel - half, channel))
    angle = (row, jnp.where(lower, channel, channel - half))
    cos = triton.load(cos_ref.at[angle], mask=rotated, other=1.0)
    sin = triton.load(sin_ref.at[angle], mask=rotated, other=0.0)
    sin = jnp.where(lower, -sin, sin)

    def normed_rotated(start, exists, norm_ref):
        """Heads whose channels begin at `start [n, 1]`."""

        def read(channels):
            mask = jnp.broadcast_to(exists, (len(start), dim))
            x = triton.load(qkv_ref.at[row, start + channels], mask=mask, other=0).astype(jnp.float32)
            return x, 1.0 + triton.load(norm_ref.at[channels]).astype(jnp.float32)

        (x, weight), (other, other_weight) = read(channel), read(partner)
        inverse = lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / dim + eps)
        x, other = ((t * inverse * w).astype(q_ref.dtype) for t, w in ((x, weight), (other, other_weight)))
        return (x.astype(jnp.float32) * cos + other.astype(jnp.float32) * sin).astype(q_ref.dtype)

    query = lax.broadcasted_iota(jnp.int32, (1 << (group - 1).bit_length(), 1), 0)
    head, exists = kv_head * group + query, query < group
    q = normed_rotated(head * (2 * dim), exists, q_norm_ref)
    triton.store(q_ref.at[row, head, channel], q, mask=jnp.broadcast_to(exists, q.shape))
    key = jnp.full((1, 1), 2 * heads * dim + kv_head * dim)
    triton.store(k_ref.at[row, kv_head, channel], normed_rotated(key, jnp.full((1, 1), True), k_norm_ref))
    value = triton.load(qkv_ref.at[row, 2 * heads * dim + (kv_heads + kv_head) * dim + channel])
    triton.store(v_ref.at[row, kv_head, channel], value)


def split_norm_rope_reference(
    qkv: Array, q_norm: Array, k_norm: Array, cos: Array, sin: Array, *, heads: int, kv_heads: int, eps: float
) -> tuple[Array, Array, Array]:
    """What `split_norm_rope` must equal."""
    rows, dim, half = len(qkv), q_norm.shape[0], cos.shape[1]
    q, k, v = jnp.split(qkv.reshape(rows, -1, dim), [2 * heads, 2 * heads + kv_heads], axis=1)

    def normed_rotated(x, weight):
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * (1.0 + weight.astype(jnp.float32))
        x = x.astype(qkv.dtype).astype(jnp.float32)
        a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1).astype(qkv.dtype)

    return normed_rotated(q[:, ::2], q_norm), normed_rotated(k, k_norm), v


def _check(qkv, q_norm, k_norm, cos, sin, heads, kv_heads) -> None:
    rows, dim = len(qkv), q_norm.shape[0]
    if dim & (dim - 1) or k_norm.shape != (dim,) or heads % kv_heads:
        raise ValueError(
            f"norms must be [a power of two], and {heads} heads a multiple of {kv_heads}, got {list(q_norm.shape)} "
            f"and {list(k_norm.shape)}"
        )
    if qkv.shape != (rows, 2 * (heads + kv_heads) * dim):
        raise ValueError(f"qkv must be [rows, {2 * (heads + kv_heads) * dim}], got {list(qkv.shape)}")
    if cos.shape != sin.shape or cos.shape[:1] != (rows,) or 2 * cos.shape[1] > dim:
        raise ValueError(f"cos and sin must be [{rows}, up to {dim // 2}], got {list(cos.shape)} and {list(sin.shape)}")
