"""Matrices of 4- and 8-bit integers with scales."""

from qwen38_jax.quantization.tensor import (
    LAYOUTS,
    Layout,
    QuantTensor,
    RowBlocks,
    Weight,
    dequantize,
    in_rows,
    is_quantised,
    quant_tensor,
    quantize,
)

__all__ = [
    "LAYOUTS",
    "Layout",
    "QuantTensor",
    "RowBlocks",
    "Weight",
    "dequantize",
    "in_rows",
    "is_quantised",
    "quant_tensor",
    "quantize",
]
