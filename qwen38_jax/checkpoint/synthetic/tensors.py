"""The tensors of one random weight in each format, made row by row when they are written."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from qwen38_jax.checkpoint.formats import FP8_BLOCK
from qwen38_jax.checkpoint.synthetic.draw import RMS_FP8, Draw
from qwen38_jax.checkpoint.write import NewTensor

GROUP = 128  # weights that share a scale

_RMS_CODE = {bits: math.sqrt(np.mean(np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) ** 2)) for bits in (4, 8)}
_GPTQ_SYMMETRIC = 0x77777777  # eight zero points of 8, stored less 1


def dense(
    name: str, shape: tuple[int, ...], seed: int, dtype: str, *, mean: float = 0.0, std: float | None = None
) -> list[NewTensor]:
    """Normals around `mean`, 0.05 wide if it is a vector.

    Of more axes by default 1 / sqrt(inputs), which makes neither activations nor logits grow with the width.
    """
    if std is None:
        std = 0.05 if len(shape) == 1 else math.prod(shape[1:]) ** -0.5

    def rows() -> Iterator[np.ndarray]:
        draw = Draw(seed, name)
        for part in draw.parts(shape):
            values = draw.normal(part, std, dtype)
            yield values if not mean else (mean + values.astype(np.float32)).astype(dtype)

    return [NewTensor(name, dtype, shape, rows)]


def uniform(name: str, shape: tuple[int, ...], seed: int, dtype: str, low: float, high: float) -> list[NewTensor]:
    """Uniform between two bounds; of few values."""
    return [NewTensor(name, dtype, shape, lambda: [Draw(seed, name).uniform(low, high, shape).astype(dtype)])]


def log_uniform(name: str, shape: tuple[int, ...], seed: int, dtype: str, low: float, high: float) -> list[NewTensor]:
    """Logarithms of numbers uniform between two bounds; of few values."""
    return [NewTensor(name, dtype, shape, lambda: [np.log(Draw(seed, name).uniform(low, high, shape)).astype(dtype)])]


def packed(
    weight: str, shape: tuple[int, int], seed: int, bits: int = 4, scale_dtype: str = "float16"
) -> list[NewTensor]:
    """A matrix [N, K] as compressed-tensors packs it: every code occurs, half of the scales are negative."""
    n, k = shape
    return [
        _words(f"{weight}_packed", (n, k * bits // 32), seed),
        _scales(f"{weight}_scale", (n, k // GROUP), seed, k, bits, scale_dtype),
        NewTensor(f"{weight}_shape", "int64", (2,), lambda: [np.array(shape, np.int64)]),
    ]


def gptq(weight: str, shape: tuple[int, int], seed: int, *, act_order: bool) -> list[NewTensor]:
    """A matrix [N, K] as GPTQ packs it, transposed, with symmetric codes."""
    (n, k), module = shape, weight.removesuffix("weight")
    groups = k // GROUP

    def g_idx() -> list[np.ndarray]:
        columns = Draw(seed, f"{module}g_idx").permutation(k) if act_order else np.arange(k)
        return [(columns // GROUP).astype(np.int32)]

    zeros = np.int32(_GPTQ_SYMMETRIC)
    return [
        _words(f"{module}qweight", (k // 8, n), seed),
        NewTensor(f"{module}qzeros", "int32", (groups, n // 8), lambda: [np.full((groups, n // 8), zeros)]),
        _scales(f"{module}scales", (groups, n), seed, k, 4, "float16"),
        NewTensor(f"{module}g_idx", "int32", (k,), g_idx),
    ]


def fp8(weight: str, shape: tuple[int, int], seed: int) -> list[NewTensor]:
    """A matrix [N, K] of FP8 values with a scale for each block."""
    blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
    [values] = dense(weight, shape, seed, "float8_e4m3fn", std=RMS_FP8)

    def scales() -> list[np.ndarray]:
        size = np.exp(0.2 * Draw(seed, f"{weight}_scale_inv").normal(blocks)) / (RMS_FP8 * math.sqrt(shape[1]))
        return [size.astype("bfloat16")]

    return [values, NewTensor(f"{weight}_scale_inv", "bfloat16", blocks, scales)]


def packed_config(bits: dict[str, int], ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint with `packed` weights; `bits` by what each group targets."""

    def group(target: str, bits: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
        return {"format": "pack-quantized", "targets": [target], "weights": weights}

    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{i}": group(*target) for i, target in enumerate(bits.items())},
        "quantization_status": "compressed",
        "ignore": ignore,
    }


def _words(name: str, shape: tuple[int, int], seed: int) -> NewTensor:
    """Packed codes: as all of them are to occur, words of random bits."""

    def rows() -> Iterator[np.ndarray]:
        draw = Draw(seed, name)
        yield from map(draw.words, draw.parts(shape))

    return NewTensor(name, "int32", shape, rows)


def _scales(name: str, shape: tuple[int, int], seed: int, k: int, bits: int, dtype: str) -> NewTensor:
    """Scales that give weights of K columns the size of dense ones, with random signs."""

    def rows() -> Iterator[np.ndarray]:
        draw = Draw(seed, name)
        for part in draw.parts(shape):
            size = np.exp(0.2 * draw.normal(part)) / np.float32(_RMS_CODE[bits] * math.sqrt(k))
            yield np.copysign(size, draw.normal(part)).astype(dtype)

    return NewTensor(name, dtype, shape, rows)
