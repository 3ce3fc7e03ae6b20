"""Normalisations. All compute in fp32 and return the dtype they were given."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Zero-centred RMSNorm over the last axis: `x / rms(x) * (1 + weight)`, multiplied before the cast.

    Every norm of the model is of this kind except the one inside Gated DeltaNet.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """RMSNorm with a plain weight, times `silu(gate)`: the output norm of Gated DeltaNet.

    The normalised value is cast to the model's dtype before it meets the weight, as the reference does.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    y = weight * x32.astype(x.dtype)
    return (y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def l2_norm(x: Array) -> Array:
    """`x / |x|` over the last axis, in fp32; the epsilon sits inside the root, as in flash-linear-attention."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
