"""Matrices of 4- and 8-bit integers with scales."""

from qwen38_jax.quantization.tensor import (
    BLOCK_ROWS,
    LAYOUTS,
    Indexed,
    Layout,
    QuantTensor,
    RowBlocks,
    Weight,
    dequantize,
    in_rows,
    is_quantised,
    kernel_weight,
    quant_tensor,
    quantize,
)

__all__ = [
    "BLOCK_ROWS",
    "LAYOUTS",
    "Indexed",
    "Layout",
    "QuantTensor",
    "RowBlocks",
    "Weight",
    "dequantize",
    "in_rows",
    "is_quantised",
    "kernel_weight",
    "quant_tensor",
    "quantize",
]
