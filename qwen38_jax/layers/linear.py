"""Matrix products with weights, which may be quantised: no caller asks in which format."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.int8_matmul import int8_matmul
from qwen38_jax.layers.kernels import takes_kernels
from qwen38_jax.quantization import Indexed, QuantTensor, RowBlocks, Weight, dequantize, kernel_weight

Array = jax.Array

# On a GPU an fp32 product may run as TF32, which visibly hurts. For products of half precision this changes nothing.
PRECISION = lax.Precision.HIGHEST


def linear(x: Array, w: Weight, out_dtype: jnp.dtype | None = None) -> Array:
    """`x [..., K] @ w [N, K].T -> [..., N]`, summed in fp32, in `x.dtype` unless `out_dtype` says otherwise.

    Integers in the layout "mma" are read by their kernel where there is one: on a GPU, for rows of half precision.
    Elsewhere, and in another layout, a quantised `w` is dequantised to `x.dtype` first.
    """
    if isinstance(w, RowBlocks):
        return jnp.concatenate([linear(x, block, out_dtype) for block in w.blocks], axis=-1)
    if isinstance(w, (QuantTensor, Indexed)):
        stack, layer = (w.stack, w.layer) if isinstance(w, Indexed) else (w, None)
        if stack.layout == "mma" and takes_kernels("auto", x.dtype):
            return packed_linear(x, stack, layer, out_dtype)
        w = dequantize(w, x.dtype)
    y = jnp.einsum("...k,nk->...n", x, w, precision=precision_for(x), preferred_element_type=jnp.float32)
    return y.astype(out_dtype or x.dtype)


def packed_linear(
    x: Array,
    w: QuantTensor,
    layer: Array | int | None = None,
    out_dtype: jnp.dtype | None = None,
    *,
    interpret: bool = False,
) -> Array:
    """`linear` through the kernel, for `x` of half precision and `w` in the layout "mma".

    layer: which matrix of a stack `[layers, N, K]`; None if there is no stack. interpret: see `kernel_call`.
    """
    multiply = int4_matmul if w.bits == 4 else int8_matmul
    rows = x.reshape(-1, x.shape[-1])
    y = multiply(rows, kernel_weight(w), layer, out_dtype=out_dtype, interpret=interpret)
    return y.reshape(*x.shape[:-1], -1)


def precision_for(x: Array) -> lax.Precision | None:
    """That of a product with `x`: `PRECISION` for fp32.

    It is not asked of half precision, whose gradient meets cotangents of fp32 and would leave the tensor cores.
    """
    return PRECISION if x.dtype == jnp.float32 else None


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
