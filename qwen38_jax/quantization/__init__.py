"""Matrices of 4- and 8-bit integers with scales."""

from qwen38_jax.quantization.tensor import (
    QuantTensor,
    RowBlocks,
    Weight,
    dequantize,
    is_quantised,
    quant_tensor,
    quantize,
)

__all__ = ["QuantTensor", "RowBlocks", "Weight", "dequantize", "is_quantised", "quant_tensor", "quantize"]
