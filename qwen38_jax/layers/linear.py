"""Matrix products with weights."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

# On a GPU an fp32 product may run as TF32, which visibly hurts. For products of half precision this changes nothing.
PRECISION = lax.Precision.HIGHEST


def linear(x: Array, w: Array, out_dtype: jnp.dtype | None = None) -> Array:
    """`x [..., K] @ w [N, K].T -> [..., N]`, summed in fp32, in `x.dtype` unless `out_dtype` says otherwise."""
    # Not asked of half precision: its gradient meets cotangents of fp32 and would leave the tensor cores.
    precision = PRECISION if x.dtype == jnp.float32 else None
    y = jnp.einsum("...k,nk->...n", x, w, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(out_dtype or x.dtype)


def embed(table: Array, ids: Array) -> Array:
    """Rows `table [V, H][ids [...]] -> [..., H]`. An id outside the table is clamped: callers check ids first."""
    return table.at[ids].get(mode="clip")
