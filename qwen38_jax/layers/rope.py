"""Partial rotary position embedding, with the interleaved sections of M-RoPE."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen38_jax.config import ModelConfig

Array = jax.Array


@struct.dataclass
class RopeTable:
    """Rotation of each row, fp32 `[B, L, rotary_dim / 2]`."""

    cos: Array
    sin: Array


def rope_table(positions: Array, cfg: ModelConfig) -> RopeTable:
    """Rotations for `positions`, `[B, L]` for text or `[3, B, L]` (time, height, width) for M-RoPE.

    The wavelength of pair `i` is that of the rotary width, not of the head: `theta ** (-2i / rotary_dim)`.
    """
    angle = _angles(positions, cfg.rotary_dim, cfg.rope_theta)
    if positions.ndim == 3:
        angle = jnp.choose(_mrope_rows(cfg), list(angle), mode="clip")
    return RopeTable(cos=jnp.cos(angle), sin=jnp.sin(angle))


def text_rope_table(positions: Array, rotary_dim: int, theta: float) -> RopeTable:
    """Rotations for `positions [B, L]` of text."""
    angle = _angles(positions, rotary_dim, theta)
    return RopeTable(cos=jnp.cos(angle), sin=jnp.sin(angle))


def _angles(positions: Array, rotary_dim: int, theta: float) -> Array:
    """fp32 `[..., rotary_dim / 2]`."""
    half = rotary_dim // 2
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half)
    return positions.astype(jnp.float32)[..., None] * frequency.astype(np.float32)


def _mrope_rows(cfg: ModelConfig) -> np.ndarray:
    """Which of the three position rows turns each pair: time, but height and width take every third in turn."""
    i = np.arange(cfg.rotary_dim // 2)
    rows = np.zeros_like(i)
    for row in (1, 2):
        rows[(i % 3 == row) & (i < 3 * cfg.mrope_section[row])] = row
    return rows


def apply_rope(x: Array, table: RopeTable) -> Array:
    """Rotates pairs `(i, i + rotary_dim/2)` of the leading rotary channels of `x [B, L, heads, D]`, in fp32."""
    half = table.cos.shape[-1]
    cos, sin = table.cos[:, :, None], table.sin[:, :, None]
    x1, x2 = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half : 2 * half]))
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)
