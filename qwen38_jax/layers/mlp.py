"""The gated feed-forward layer."""

import jax

from qwen38_jax.layers.linear import linear
from qwen38_jax.params import Mlp


def mlp(layer: Mlp, x: jax.Array) -> jax.Array:
    """`down(silu(gate(x)) * up(x))`, `[B, L, H] -> [B, L, H]`."""
    return linear(jax.nn.silu(linear(x, layer.gate)) * linear(x, layer.up), layer.down)
