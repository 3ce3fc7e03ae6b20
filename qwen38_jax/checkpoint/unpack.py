"""Reads the parts of a stored weight as rows of arrays, in the order and the conventions of `QuantTensor`."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np

from qwen38_jax.checkpoint.files import DTYPES, CheckpointError, TensorInfo, read_columns, read_rows
from qwen38_jax.checkpoint.formats import FP8_BLOCK, Stored

# Largest piece of a tensor on its way to the device or to another file, in fp32.
CHUNK_BYTES = 16 << 20

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word that holds each of its eight columns


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array in a file, to be read by rows: `read(start, stop)` gives `[stop - start, ...]` in `dtype`."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], np.ndarray]

    def astype(self, dtype: str) -> "Rows":
        """The same array in a wider dtype."""
        return Rows(self.shape, dtype, lambda start, stop: self.read(start, stop).astype(dtype))

    def reshape(self, *shape: int) -> "Rows":
        """The same rows, each of another shape."""
        return Rows((self.shape[0], *shape), self.dtype, lambda start, stop: self.read(start, stop).reshape(-1, *shape))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Arrays of one dtype, one below the other."""
    if len(parts) == 1:
        return parts[0]
    ends = list(itertools.accumulate(part.shape[0] for part in parts))
    begins = [0, *ends[:-1]]

    def read(start: int, stop: int) -> np.ndarray:
        pieces = [
            part.read(max(start - begin, 0), min(stop, end) - begin)
            for part, begin, end in zip(parts, begins, ends, strict=True)
            if start < end and begin < stop
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return Rows((ends[-1], *parts[0].shape[1:]), parts[0].dtype, read)


def row_chunks(shape: tuple[int, ...], *, overlap: bool = True, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover an array, a few MB each.

    Args:
      overlap: all are of one length, so that one compiled program serves them all; the last goes over some rows again.
      multiple: of which each is to begin at one; the last is shorter where that does not divide the rows.
    """
    rows = shape[0]
    step = CHUNK_BYTES // (4 * math.prod(shape[1:])) // multiple * multiple
    step = min(rows, max(multiple, step))
    last = -(-(rows - step) // multiple) * multiple
    for start in range(0, rows, step):
        start = min(start, last) if overlap else start
        yield start, min(start + step, rows)


def floats(stored: Stored, dtype: str) -> Rows:
    """A weight stored in floats, `stored.shape`, in `dtype`.

    FP8 becomes `dtype` here, at twice its size or more: no product of this package takes it, and no 24 GB card holds
    this model in 8-bit floats. Such a checkpoint is a source to quantise from.
    """

    def read(start: int, stop: int) -> np.ndarray:
        values = read_rows(stored.main, start, stop)
        if stored.kind == "fp8":
            values = _scaled_blocks(stored, values, start)
        return _cast(stored.main, values, dtype)

    return Rows(stored.shape, dtype, read)


def integers(stored: Stored, dtype: str) -> dict[str, Rows]:
    """The parts of the `QuantTensor` of a matrix `[N, K]` that is to stand for `dtype`, by field name.

    `zeros` and `group_of` are left out where they say nothing: symmetric codes, columns in their own order.

    Raises:
      CheckpointError: zero points or column order contradict the other tensors or config.json; a bias is not 0.
    """
    if stored.kind == "native":
        return {name: _native(stored, name, dtype) for name in stored.parts}
    (n, k), bits = stored.shape, stored.bits
    _check_weight_shape(stored)
    _check_bias(stored)
    scales = stored.parts["weight_scale" if stored.kind == "packed" else "scales"]
    parts = {
        "codes": Rows((n, k * bits // 8), "uint8", lambda start, stop: _codes(stored, start, stop)),
        "scales": Rows(
            (n, k // stored.group),
            DTYPES[scales.dtype],
            lambda start, stop: _scales(stored, scales, start, stop, dtype),
        ),
    }
    offset = _zero_offset(stored)
    if offset is not None:
        parts["zeros"] = Rows(
            (n, k // stored.group),
            "int8",
            lambda start, stop: (_zeros(stored, start, stop).astype(np.int16) + offset).astype(np.int8),
        )
    group_of = _group_of(stored)
    if group_of is not None:
        parts["group_of"] = Rows((k,), "int32", lambda start, stop: group_of[start:stop])
    return parts


def _native(stored: Stored, name: str, dtype: str) -> Rows:
    """One field as it is. Scales, and in the layout "rows" order, are checked as those of every other format."""
    tensor = stored.parts[name]
    if name == "scales":
        return Rows(tensor.shape, DTYPES[tensor.dtype], lambda *rows: _scales(stored, tensor, *rows, dtype))
    if stored.layout == "rows" and name == "group_of":
        _group_of(stored)
    return Rows(tensor.shape, DTYPES[tensor.dtype], lambda *rows: read_rows(tensor, *rows))


def no_zeros(stored: Stored) -> Rows:
    """The zeros of symmetric codes, for a layer whose neighbours in the stack are asymmetric."""
    groups = stored.shape[1] // stored.group
    return Rows((stored.shape[0], groups), "int8", lambda start, stop: np.zeros((stop - start, groups), np.int8))


def own_order(stored: Stored) -> Rows:
    """`group_of` of columns in their own order, for a layer whose neighbours in the stack have another."""
    return Rows((stored.shape[1],), "int32", lambda start, stop: np.arange(start, stop, dtype=np.int32) // stored.group)


def _codes(stored: Stored, start: int, stop: int) -> np.ndarray:
    """Bytes uint8 [rows, K * bits / 8] of rows [start, stop)."""
    width = stored.shape[1] * stored.bits // 8
    if stored.kind == "awq":
        codes = _columns_of_words(stored, stored.main, start, stop)
        return codes[:, ::2] | codes[:, 1::2] << 4
    words = read_rows(stored.main, start, stop) if stored.kind == "packed" else read_columns(stored.main, start, stop).T
    return _bytes(words)[:, :width]


def _bytes(words: np.ndarray) -> np.ndarray:
    """Bytes [R, 4 W] of int32 words [R, W], lowest first: packed values begin at the lowest bits."""
    return np.ascontiguousarray(words, "<i4").view(np.uint8)


def _columns_of_words(stored: Stored, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) x G of unsigned values from [G, N / 8] words that are packed along N."""
    per = 32 // stored.bits
    first = start // per
    values = _unpack(_bytes(read_columns(tensor, first, -(-stop // per))), stored.bits)
    if stored.kind == "awq":
        values = values.reshape(len(values), -1, 8)[..., _AWQ_ORDER].reshape(len(values), -1)
    return values[:, start - first * per : stop - first * per].T


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned values uint8 [R, B * 8 / bits] of bytes [R, B]."""
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _scales(stored: Stored, tensor: TensorInfo, start: int, stop: int, dtype: str) -> np.ndarray:
    by_rows = stored.kind in ("packed", "native")
    scales = read_rows(tensor, start, stop) if by_rows else read_columns(tensor, start, stop).T
    values = scales.view(stored.spec.scales) if stored.spec else scales  # a layout may hold them as words
    _require_finite(tensor, values)
    largest = np.abs(values.astype(np.float32)).max(initial=0)
    if largest * 2.0**stored.bits > float(ml_dtypes.finfo(dtype).max):
        raise CheckpointError(
            f"{tensor} holds a scale of {largest}, and so weights beyond the range of {dtype}: load with a wider dtype"
        )
    return scales


def _zeros(stored: Stored, start: int, stop: int) -> np.ndarray:
    """Zero points [rows, groups] as unsigned values, as stored."""
    if stored.kind != "packed":
        return _columns_of_words(stored, stored.parts["qzeros"], start, stop)
    per = 32 // stored.bits
    first = start // per
    words = read_rows(stored.parts["weight_zero_point"], first, -(-stop // per))  # packed along N as well
    return _unpack(_bytes(words.T), stored.bits)[:, start - first * per : stop - first * per].T


def _zero_offset(stored: Stored) -> int | None:
    """What to add to stored zero points to get `QuantTensor.zeros`; None when all of them are 0 then.

    GPTQ stores them less 1 (`gptq`) or as they are (`gptq_v2`). Symmetric codes tell which by themselves: their zero is
    the middle code, so that all are 7 or all are 8 (at 4 bits), whatever config.json says.
    """
    if stored.kind == "packed" and "weight_zero_point" not in stored.parts:
        return None
    middle = 2 ** (stored.bits - 1)
    zeros = _zeros(stored, 0, stored.shape[0])
    if stored.kind != "gptq":
        return None if (zeros == middle).all() else -middle
    if (zeros == zeros.flat[0]).all() and zeros.flat[0] in (middle - 1, middle):
        return None
    tensor, declared = stored.parts["qzeros"], stored.declared
    if declared.symmetric:
        raise CheckpointError(
            f"{tensor} holds zero points from {zeros.min()} to {zeros.max()}, but quantization_config says that the "
            f"codes are symmetric (all {middle - 1}, or all {middle}): correct 'sym' in config.json, or the tensor"
        )
    if declared.zeros is None:
        raise CheckpointError(
            f"{tensor} holds asymmetric zero points, and quantization_config names no format that says whether they "
            "are stored less 1: set checkpoint_format to 'gptq' (less 1) or 'gptq_v2' (as they are) in config.json"
        )
    offset = 1 if declared.zeros == "gptq" else 0
    if offset and zeros.max() == 2 * middle - 1:
        raise CheckpointError(
            f"{tensor} holds the zero point {zeros.max()}, which less-1 storage ('gptq') cannot tell from 0, but "
            "quantization_config says 'gptq': set checkpoint_format to 'gptq_v2' if that is what it is"
        )
    _check_balance(stored, zeros, offset)
    return offset - middle


def _check_balance(stored: Stored, zeros: np.ndarray, offset: int) -> None:
    """The mean of a matrix is a small part of a step. Zero points under the wrong convention move it by a whole one."""
    rows = min(stored.shape[0], 1024)
    mean = _unpack(_codes(stored, 0, rows), stored.bits).mean() - zeros[:rows].mean() - offset
    other, other_mean = ("gptq_v2", mean + 1) if offset else ("gptq", mean - 1)
    if abs(mean) > 0.5 > abs(other_mean):
        raise CheckpointError(
            f"{stored.parts['qzeros']} read as {stored.declared.zeros!r}, which quantization_config says, puts the "
            f"mean weight {mean:.2f} steps from zero; as {other!r} it would be {other_mean:.2f}: correct "
            "checkpoint_format in config.json"
        )


def _group_of(stored: Stored) -> np.ndarray | None:
    """int32 [K], the group of each column; None for k // group."""
    tensor = stored.parts.get({"packed": "weight_g_idx", "native": "group_of"}.get(stored.kind, "g_idx"))
    if tensor is None:
        return None
    columns = stored.shape[1]
    groups = columns // stored.group
    group_of = read_rows(tensor, 0, columns)
    if (group_of == -1).all():  # compressed-tensors: made and never set
        return None
    if not np.array_equal(np.unique(group_of), np.arange(groups)):
        raise CheckpointError(
            f"{tensor} names groups from {group_of.min()} to {group_of.max()}, but the scales have {groups} groups, "
            f"each of which some column must name: the tensors belong to different weights"
        )
    return None if np.array_equal(group_of, np.arange(columns) // stored.group) else group_of.astype(np.int32)


def _check_weight_shape(stored: Stored) -> None:
    tensor = stored.parts.get("weight_shape")
    if tensor is not None and tuple(read_rows(tensor, 0, 2)) != stored.shape:
        raise CheckpointError(
            f"{tensor} says {read_rows(tensor, 0, 2).tolist()}, but config.json and the shape of {stored.main.name!r} "
            f"{list(stored.main.shape)} make it {list(stored.shape)}: remove the tensor if it is the one at fault"
        )


def _check_bias(stored: Stored) -> None:
    """Some GPTQ writers give every matrix a bias; this architecture has none, so that it must be 0."""
    tensor = stored.parts.get("bias")
    if tensor is not None and read_rows(tensor, 0, stored.shape[0]).any():
        raise CheckpointError(f"{tensor} is not 0, but {stored.weight!r} has no bias in this architecture")


def _scaled_blocks(stored: Stored, values: np.ndarray, start: int) -> np.ndarray:
    """Rows of FP8 values, from row `start` on, times the scales of their blocks, in fp32."""
    tensor = stored.parts["weight_scale_inv"]
    rows = np.arange(start, start + len(values)) // FP8_BLOCK
    scales = read_rows(tensor, rows[0], rows[-1] + 1).astype(np.float32)
    _require_finite(tensor, scales)
    values = values.astype(np.float32)
    _require_finite(stored.main, values)
    return values * np.repeat(scales, FP8_BLOCK, axis=1)[rows - rows[0], : stored.shape[1]]


def _require_finite(tensor: TensorInfo, values: np.ndarray) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        raise CheckpointError(
            f"{tensor} holds {values[~finite][0]} in {np.count_nonzero(~finite)} places: the file is damaged or its "
            "quantiser failed; get it again"
        )


def _cast(tensor: TensorInfo, values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in `dtype`; a finite value that it cannot hold is an error, not an infinity."""
    if values.dtype.name == dtype:
        return values
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if ml_dtypes.finfo(dtype).max < ml_dtypes.finfo(values.dtype).max:
        lost = np.isinf(cast) & np.isfinite(values)
        if lost.any():
            raise CheckpointError(
                f"{tensor} holds {values[lost][0]}, beyond the range of {dtype}: load with a wider dtype"
            )
    return cast
