"""What becomes of the rows of a matrix on their way from one checkpoint into another."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.checkpoint.files import CheckpointError
from qwen38_jax.checkpoint.native import Spec
from qwen38_jax.checkpoint.unpack import Rows, row_chunks
from qwen38_jax.checkpoint.write import CODES, NewTensor
from qwen38_jax.quantization import LAYOUTS, dequantize, quant_tensor, quantize

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Consecutive rows of a piece: the tensor that they are, by its Hugging Face name; how many; its old format."""

    tensor: str
    rows: int
    was: str


@dataclasses.dataclass(frozen=True)
class Piece:
    """One matrix (or vector) to be written.

    Attributes:
      name: of its tensors, without the last part.
      arrays: as the source has them.
      shape: of the matrix that the source has.
      source, target: how it is quantised there and is to be here; None for floats. Integers only change their layout.
      dtype: of floats that stay floats.
      cast: whether these are to be rounded to `dtype`, as FP8 is; else they have it.
      ids: rows to take; None for all.
      origins: what its rows are.
    """

    name: str
    arrays: dict[str, Rows]
    shape: tuple[int, ...]
    source: Spec | None
    target: Spec | None
    dtype: str
    cast: bool
    ids: np.ndarray | None
    origins: tuple[Origin, ...]

    @property
    def fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Last part of the name, dtype and shape of each tensor."""
        shape = self.shape if self.ids is None else (len(self.ids), *self.shape[1:])
        if self.target is None:
            return {"weight": (self.dtype, shape)}
        try:
            template = self.target.template(shape, self.arrays)
        except ValueError as error:
            what = f"{self.origins[0].tensor} {list(shape)}"
            raise CheckpointError(f"{what} cannot be stored as {self.target.label}: {error}") from None
        arrays = {field: getattr(template, field) for field in ("codes", "scales", "zeros", "group_of")}
        return {field: (array.dtype.name, array.shape) for field, array in arrays.items() if array is not None}

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in self.fields.values())

    def make(self) -> tuple[list[NewTensor], dict[str, dict]]:
        """The tensors, and by tensor of origin what was done to it."""
        rows = self.arrays if self.source is None else unpacked(self.arrays, self.source, self.shape)
        if self.ids is not None:
            rows = {field: own if field == "group_of" else cut(own, self.ids) for field, own in rows.items()}
        squares, what = None, ", ".join(origin.tensor for origin in self.origins)
        if self.target is None and not self.cast:
            made = {"weight": lambda: chunks(rows["weight"])}
        elif self.target is None:
            array, squares = cast(rows["weight"], self.dtype, what)
            made = {"weight": lambda: [array]}
        else:
            if self.source is None:
                arrays, squares = quantised(rows["weight"], self.target, what)
            else:
                arrays = {field: own.read(0, own.shape[0]) for field, own in rows.items()}
            arrays = packed(arrays, self.target)
            made = {field: lambda field=field: [arrays[field]] for field in arrays}
        tensors = [NewTensor(f"{self.name}.{field}", *self.fields[field], make) for field, make in made.items()]
        now = self.target.label if self.target else CODES[self.dtype].lower()
        return tensors, record(self.origins, now, self.name, squares)


def record(origins: Sequence[Origin], now: str, name: str, squares: np.ndarray | None) -> dict[str, dict]:
    """By tensor of origin what was done to it.

    Args:
      now: its format.
      name: what it is stored as.
      squares: `[2, N]`, of each row the sum of squared errors and of squared values; None where nothing changed.
    """
    records, begin = {}, 0
    for origin in origins:
        end = begin + origin.rows
        error, size = (0.0, 0.0) if squares is None else squares[:, begin:end].sum(axis=1).tolist()
        records[origin.tensor] = {
            "was": origin.was,
            "is": now,
            "stored_as": name,
            "rows": [begin, end],
            "relative_rms_error": math.sqrt(error / size) if size else 0.0,
        }
        begin = end
    return records


def quantised(rows: Rows, spec: Spec, what: str) -> tuple[Arrays, np.ndarray]:
    """Codes and scales of floats `[N, K]`, rounded to the nearest, in the layout "rows"; and the squares of `record`.

    Raises:
      CheckpointError: a value is not finite; the message names the tensor by `what`.
    """
    n, k = rows.shape
    arrays = {
        "codes": np.empty((n, k * spec.bits // 8), np.uint8),
        "scales": np.empty((n, k // spec.group), spec.scales),
    }
    squares = np.empty((2, n))
    for start, stop in row_chunks(rows.shape):
        w = _finite(rows.read(start, stop).astype(np.float32), what)
        codes, scales, *sums = _round(w, spec.bits, spec.group, spec.scales)
        arrays["codes"][start:stop], arrays["scales"][start:stop] = codes, scales
        squares[:, start:stop] = sums
    return arrays, squares


def cast(rows: Rows, dtype: str, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Floats `[N, K]` in another dtype, and the squares of `record`; raises what `quantised` does."""
    array, squares = np.empty(rows.shape, dtype), np.empty((2, rows.shape[0]))
    for start, stop in row_chunks(rows.shape):
        w = _finite(rows.read(start, stop).astype(np.float32), what)
        array[start:stop] = w
        squares[:, start:stop] = ((array[start:stop].astype(np.float32) - w) ** 2).sum(axis=1), (w**2).sum(axis=1)
    return array, squares


def _finite(w: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(w).all():
        raise CheckpointError(f"{what}: a value is not finite, so the file is damaged; get it again")
    return w


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _round(w: jax.Array, bits: int, group: int, scales: str) -> tuple[jax.Array, ...]:
    """Codes and scales of `w [R, K]`, and of each row the sum of squared errors and of squared values."""
    q = quantize(w, bits, group, scale_dtype=scales)
    return q.codes, q.scales, jnp.sum((dequantize(q) - w) ** 2, axis=-1), jnp.sum(w**2, axis=-1)


def packed(arrays: Arrays, spec: Spec) -> Arrays:
    """Arrays of the layout "rows" in another."""
    if spec.layout == "rows":
        return arrays
    w = quant_tensor(**jax.tree.map(jnp.asarray, arrays), bits=spec.bits, dtype="float32")
    w = LAYOUTS[spec.layout].pack(w)
    return {field: np.asarray(getattr(w, field)) for field in arrays}


def unpacked(arrays: dict[str, Rows], spec: Spec, shape: tuple[int, int]) -> dict[str, Rows]:
    """Arrays of any layout in the layout "rows"."""
    if spec.layout == "rows":
        return arrays
    read = {field: jnp.asarray(rows.read(0, rows.shape[0])) for field, rows in arrays.items()}
    w = LAYOUTS[spec.layout].unpack(spec.template(shape, arrays).replace(**read))
    made = {field: np.asarray(getattr(w, field)) for field in arrays}
    return {
        field: Rows(array.shape, array.dtype.name, lambda start, stop, array=array: array[start:stop])
        for field, array in made.items()
    }


def cut(rows: Rows, ids: np.ndarray) -> Rows:
    """The rows of ascending `ids`, found a chunk of the source at a time."""

    def read(start: int, stop: int) -> np.ndarray:
        wanted, pieces = ids[start:stop], []
        for begin, end in row_chunks(rows.shape, overlap=False):
            own = wanted[(wanted >= begin) & (wanted < end)]
            if len(own):
                pieces.append(rows.read(int(own[0]), int(own[-1]) + 1)[own - own[0]])
        return np.concatenate(pieces)

    return Rows((len(ids), *rows.shape[1:]), rows.dtype, read)


def chunks(rows: Rows) -> Iterator[np.ndarray]:
    """An array in consecutive pieces."""
    for start, stop in row_chunks(rows.shape, overlap=False):
        yield rows.read(start, stop)
