"""Matrices of 4- and 8-bit integers with scales."""

from qwen38_jax.quantization.tensor import QuantTensor, Weight, dequantize, quant_tensor, quantize

__all__ = ["QuantTensor", "Weight", "dequantize", "quant_tensor", "quantize"]
