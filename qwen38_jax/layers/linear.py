"""Matrix products with weights, which may be quantised: no caller asks in which format."""

import jax
import jax.numpy as jnp
from jax import lax

from qwen38_jax.quantization import QuantTensor, RowBlocks, Weight, dequantize

Array = jax.Array

# On a GPU an fp32 product may run as TF32, which visibly hurts. For products of half precision this changes nothing.
PRECISION = lax.Precision.HIGHEST


def linear(x: Array, w: Weight, out_dtype: jnp.dtype | None = None) -> Array:
    """`x [..., K] @ w [N, K].T -> [..., N]`, summed in fp32, in `x.dtype` unless `out_dtype` says otherwise.

    A quantised `w` is dequantised to `x.dtype` first.
    """
    if isinstance(w, RowBlocks):
        return jnp.concatenate([linear(x, block, out_dtype) for block in w.blocks], axis=-1)
    if isinstance(w, QuantTensor):
        w = dequantize(w, x.dtype)
    # Not asked of half precision: its gradient meets cotangents of fp32 and would leave the tensor cores.
    precision = PRECISION if x.dtype == jnp.float32 else None
    y = jnp.einsum("...k,nk->...n", x, w, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(out_dtype or x.dtype)


def embed(table: Weight, ids: Array) -> Array:
    """Rows `table [V, H][ids [...]] -> [..., H]` in `table.dtype`; of a quantised table only these are dequantised.

    An id outside the table is clamped: callers check ids first.

    Raises:
      ValueError: a quantised table is in another layout than "rows".
    """
    return dequantize(rows_of(table, ids))


def rows_of(table: Array | QuantTensor, ids: Array) -> Array | QuantTensor:
    """The matrix of rows `ids [...]` of `table [V, H]`, stored as that is. An id outside the table is clamped."""

    def rows(t):
        return t.at[ids].get(mode="clip")

    if not isinstance(table, QuantTensor):
        return rows(table)
    if table.layout != "rows":
        raise ValueError(f"a table to look up must be in the layout 'rows', not {table.layout!r}")
    zeros = None if table.zeros is None else rows(table.zeros)
    return table.replace(codes=rows(table.codes), scales=rows(table.scales), zeros=zeros)
