"""The gated feed-forward layer."""

import jax
import jax.numpy as jnp

from qwen38_jax.layers.linear import linear
from qwen38_jax.params import Mlp


def mlp(layer: Mlp, x: jax.Array) -> jax.Array:
    """`down(silu(gate(x)) * up(x))`, `[B, L, H] -> [B, L, H]`."""
    gate, up = jnp.split(linear(x, layer.gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, layer.down)
