"""Normalisations. All compute in fp32 and return the dtype they were given."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Zero-centred RMSNorm over the last axis: `x / rms(x) * (1 + weight)`, multiplied before the cast.

    Every norm of the model is of this kind except the one inside Gated DeltaNet.
    """
    return (_normalised(x, eps) * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def plain_rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis with a plain weight: `x / rms(x) * weight`, the norm of Qwen3 and of its drafters.

    The normalised value is cast to the dtype of `x` before it meets the weight, as the reference does.
    """
    return weight * _normalised(x, eps).astype(x.dtype)


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """RMSNorm with a plain weight, times `silu(gate)`: the output norm of Gated DeltaNet."""
    y = plain_rms_norm(x, weight, eps)
    return (y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def l2_norm(x: Array) -> Array:
    """`x / |x|` over the last axis, in fp32; the epsilon sits inside the root, as in flash-linear-attention."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _normalised(x: Array, eps: float) -> Array:
    """`x / rms(x)` over the last axis, fp32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
