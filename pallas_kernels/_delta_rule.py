"""What the kernels of Gated DeltaNet share."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from pallas_kernels._instructions import HIGHEST

Array = jax.Array


def takes_heads(keys: int, values: int) -> bool:
    """Whether the kernels take heads of Dk and Dv: powers of two from 16 on."""
    return all(d >= 16 and d & (d - 1) == 0 for d in (keys, values))


def product(interpret: bool):
    """The product of fp32 matrices, exact in all but a few bits."""
    return functools.partial(triton.dot, precision=HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3)


def load_rows(place, kept: Array) -> Array:
    """`[rows, columns]`, zero where not kept."""
    return triton.load(place, mask=jnp.broadcast_to(kept[:, None], place.shape), other=0.0)


def unit_lower_inverse(a: Array, row: Array, dot) -> Array:
    """`(I + A)^-1` for the part A of `a [n, n]` below the diagonal; `row` counts to n, a power of two.

    Block forward substitution: inverses of diagonal blocks of one size give those of twice the size, whose corner is
    -X22 A21 X11. It stays as accurate as solving row by row, and takes as many steps as n has binary digits.
    """
    inverse = jnp.where(row[:, None] == row[None, :], 1.0, 0.0)
    size = 1
    while size < row.size:
        block, half = lax.div(row, jnp.full_like(row, 2 * size)), lax.div(row, jnp.full_like(row, size))
        corner = (block[:, None] == block[None, :]) & (half[:, None] > half[None, :])
        step = jnp.where(corner, a, 0.0)
        inverse = inverse - (step if size == 1 else dot(dot(inverse, step), inverse))
        size *= 2
    return inverse
