"""Writes integers as compressed-tensors "pack-quantized" tensors, and the config that goes with them.

The inverse of `unpack` for that format; codes and zero points keep their bits, scales their dtype.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from qwen38_jax.checkpoint.write import NewTensor


@dataclasses.dataclass(frozen=True)
class Packed:
    """One matrix `[N, K]` of integers to be written.

    Attributes:
      weight: the name that the matrix would have in floats, e.g. `model.layers.0.mlp.up_proj.weight`.
      shape: N, K.
      bits: 4 or 8.
      arrays: dtypes and shapes of those fields that a `QuantTensor` of it has, by field name.
      read: makes a field's array.
    """

    weight: str
    shape: tuple[int, int]
    bits: int
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    read: Callable[[str], np.ndarray]

    @property
    def tensors(self) -> list[NewTensor]:
        (n, k), bits = self.shape, self.bits
        dtype, scales = self.arrays["scales"]
        made = [
            ("packed", "int32", (n, -(-k * bits // 32)), lambda: _words(self.read("codes"))),
            ("scale", dtype, scales, lambda: self.read("scales")),
            ("shape", "int64", (2,), lambda: np.array(self.shape, np.int64)),
        ]
        if "zeros" in self.arrays:
            shape = (-(-n * bits // 32), scales[1])
            made.append(("zero_point", "int32", shape, lambda: _packed_zeros(self.read("zeros"), bits)))
        if "group_of" in self.arrays:
            made.append(("g_idx", "int32", (k,), lambda: self.read("group_of")))
        return [
            NewTensor(f"{self.weight}_{part}", dtype, shape, lambda make=make: [make()])
            for part, dtype, shape, make in made
        ]

    @property
    def scheme(self) -> dict[str, Any]:
        """The `weights` of the config group that this matrix belongs to."""
        groups = self.arrays["scales"][1][1]
        scheme = {"num_bits": self.bits, "type": "int", "symmetric": "zeros" not in self.arrays}
        if groups == 1:
            return scheme | {"strategy": "channel"}
        scheme |= {"strategy": "group", "group_size": self.shape[1] // groups}
        return scheme | ({"actorder": "group"} if "group_of" in self.arrays else {})


def quantization_config(matrices: Iterable[Packed], dense: Iterable[str]) -> dict[str, Any] | None:
    """What config.json says about these matrices, module by module, so that no pattern can take in too many.

    Args:
      dense: names of the weights that stay in floats and that a reader might take for quantised.

    Returns None without matrices.
    """
    groups: dict[str, dict[str, Any]] = {}
    for matrix in matrices:
        group = groups.setdefault(
            str(matrix.scheme), {"format": "pack-quantized", "weights": matrix.scheme, "targets": []}
        )
        group["targets"].append(matrix.weight.removesuffix(".weight"))
    if not groups:
        return None
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
        "ignore": [name.removesuffix(".weight") for name in dense],
    }


def _words(codes: np.ndarray) -> np.ndarray:
    """int32 [R, W] of bytes [R, B], lowest first, the last word filled up with 0."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    return np.ascontiguousarray(codes).view("<i4")


def _packed_zeros(zeros: np.ndarray, bits: int) -> np.ndarray:
    """int32 [N * bits / 32, G] of zero points [N, G], packed along N."""
    values = (zeros.T.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % (32 // bits))))
    return _words(values if bits == 8 else values[:, ::2] | values[:, 1::2] << 4).T
