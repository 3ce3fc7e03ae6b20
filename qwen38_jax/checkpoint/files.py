"""Files of a checkpoint directory: JSON, safetensors headers and rows, the index over the shards."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# safetensors dtype -> bits of one value.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
# Of the dtypes that are read and written here.
_NUMPY = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "U32": np.uint32,
    "I8": np.int8,
    "U8": np.uint8,
}
DTYPES = {code: np.dtype(dtype).name for code, dtype in _NUMPY.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_MAX_SHOWN = 10


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be used. The message names the file, the tensor and the remedy."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor as a file's header describes it; `dtype` is the safetensors code, e.g. `BF16`.

    `begin` is the place of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name!r}"


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What the headers of a directory's safetensors files declare. No tensor data has been read.

    Attributes:
      listing: the file that says which tensors there are: the index, the only shard, or the directory.
      tensors: by the name in the file.
      problems: what is wrong with the files, one message each.
      notes: what is unusual and harmless.
    """

    listing: Path
    tensors: dict[str, TensorInfo]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def reject(problems: Iterable[str]) -> None:
    """Raises one CheckpointError that lists the problems, if there are any."""
    problems = list(problems)
    if problems:
        more = len(problems) - _MAX_SHOWN
        tail = [f"... and {more} more problems"] if more > 0 else []
        raise CheckpointError("\n".join(problems[:_MAX_SHOWN] + tail))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError when it is absent, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: copy it from the original checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def require_tokenizer(directory: str | Path) -> Path:
    """The path of the directory's tokenizer.json; CheckpointError when there is none."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: text needs the checkpoint's own tokenizer; copy tokenizer.json (with "
            "tokenizer_config.json and chat_template.jinja) from the original checkpoint, or pass token ids"
        )
    return path


def weights_hash(directory: Path) -> str:
    """SHA-256 over a directory's weight files, by name; CheckpointError when there are none."""
    digest = hashlib.sha256()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} has no *.safetensors file: it is not a checkpoint")
    for path in files:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def read_rows(tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of a tensor's first axis."""
    return _read(tensor, slice(start, stop))


def read_columns(tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Columns [start, stop) of a matrix."""
    return _read(tensor, (slice(None), slice(start, stop)))


def map_tensor(tensor: TensorInfo) -> np.ndarray:
    """The tensor as an array that is read from the file where it is touched."""
    if not tensor.nbytes:  # of which there is no map
        return np.empty(tensor.shape, _NUMPY[tensor.dtype])
    return np.memmap(tensor.path, _NUMPY[tensor.dtype], "r", tensor.begin, tensor.shape)


def _read(tensor: TensorInfo, where: slice | tuple[slice, slice]) -> np.ndarray:
    """A part of a tensor.

    Rows are read, not mapped: no page of the file counts as this process's memory then. The library's own slices are
    copied while it holds Python's lock, so that threads would read one after the other.
    """
    try:
        if not isinstance(where, slice):
            return np.array(map_tensor(tensor)[where])
        row = math.prod(tensor.shape[1:]) * _BITS[tensor.dtype] // 8
        data = np.empty((where.stop - where.start) * row, np.uint8)
        left = memoryview(data)
        with tensor.path.open("rb", buffering=0) as file:
            file.seek(tensor.begin + where.start * row)
            while left and (n := file.readinto(left)):
                left = left[n:]
        if left:
            raise OSError(f"it ends {len(left)} bytes too early")
        return data.view(_NUMPY[tensor.dtype]).reshape(-1, *tensor.shape[1:])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor} cannot be read ({error}): download the file again") from error


def take_inventory(directory: Path) -> Inventory:
    """Reads the index and every shard's header. Faults become `problems`; only an absent directory raises."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: pass the folder that holds config.json")
    index, problems = _read_index(directory)
    found = sorted(directory.glob("*.safetensors"))
    shards = found if index is None else sorted({directory / shard for shard in index.values()})
    tensors: dict[str, TensorInfo] = {}
    readable = set()
    for path in shards:
        try:
            header = read_header(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        readable.add(path)
        for name, tensor in header.items():
            if name in tensors:
                problems.append(f"{tensor} is in {tensors[name].path.name} as well: remove one of the two")
            tensors.setdefault(name, tensor)
    if not shards:
        problems.append(f"{directory} holds no *.safetensors file: download the weights, or convert them")
    if index is not None:
        problems += _index_disagreements(directory, index, tensors, readable)
    listing = directory / INDEX if index is not None else shards[0] if len(shards) == 1 else directory
    notes = [f"{path} is not named by {INDEX} and was ignored" for path in found if path not in shards]
    return Inventory(listing, tensors, tuple(problems), tuple(notes))


def _read_index(directory: Path) -> tuple[dict[str, str] | None, list[str]]:
    """The index's map from tensor to shard, or None without a (usable) index; and what is wrong with it."""
    path = directory / INDEX
    if not path.exists():
        return None, []
    try:
        weight_map = read_json(path).get("weight_map")
    except CheckpointError as error:
        return None, [str(error)]
    if not isinstance(weight_map, dict) or not weight_map:
        return None, [f"{path} lacks a 'weight_map' from tensors to shards: download it again"]
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            return None, [f"{path}: tensor {name!r} is mapped to {shard!r}, which is not the name of a file beside it"]
    problems = []
    if (directory / SINGLE).exists() and SINGLE not in weight_map.values():
        # Other loaders would take the single file: which of the two is stale is for the user to say.
        problems.append(f"{directory / SINGLE} stands beside an index that does not name it: remove one of the two")
    return weight_map, problems


def _index_disagreements(
    directory: Path, index: dict[str, str], tensors: dict[str, TensorInfo], readable: set[Path]
) -> list[str]:
    problems = []
    for name, shard in index.items():
        path = directory / shard
        if path in readable and (name not in tensors or tensors[name].path != path):
            problems.append(f"{directory / INDEX} places tensor {name!r} in {shard}, which does not hold it")
    for name, tensor in tensors.items():
        if name not in index:
            problems.append(f"{tensor} is not in {INDEX}: index and shards belong to different checkpoints")
    return problems


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors a safetensors file declares, checked against its size.

    The library checks too, when it opens the file, but does not say which tensor is at fault.

    Raises:
      CheckpointError: no such file, not a safetensors file, truncated, or a header that contradicts the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: its header claims {length} bytes, the file has {size}; "
                    "download it again (a small text file here is a Git LFS pointer)"
                )
            header = json.loads(file.read(length), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing although {INDEX} names it: download the shard") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has an unreadable safetensors header ({error}): download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a safetensors header that is not a JSON object: download it again")
    header.pop("__metadata__", None)
    return _check_header(path, header, 8 + length, size)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result


def _check_header(path: Path, header: dict[str, Any], data_begin: int, size: int) -> dict[str, TensorInfo]:
    """Every tensor's bytes must be as many as its shape needs, and together they must tile the file."""
    spans, data_bytes = [], size - data_begin
    for name, entry in header.items():
        tensor = _tensor_info(path, name, entry, data_begin)
        begin, end = entry["data_offsets"]
        if end - begin != tensor.nbytes:
            raise CheckpointError(
                f"{tensor} takes {end - begin} bytes of the file, but {tensor.dtype} {list(tensor.shape)} is "
                f"{tensor.nbytes} bytes: the header is wrong, download the file again"
            )
        if end > data_bytes:
            raise CheckpointError(
                f"{tensor} ends at byte {end} of {data_bytes}: the file is truncated, download it again"
            )
        spans.append((begin, end, tensor))
    expected = 0
    for begin, end, tensor in sorted(spans, key=lambda span: span[:2]):
        if begin != expected:
            fault = "overlaps the tensor before it" if begin < expected else "leaves a gap before it"
            raise CheckpointError(f"{tensor} {fault} (byte {begin}, expected {expected}): download the file again")
        expected = end
    if expected != data_bytes:
        raise CheckpointError(f"{path} has {data_bytes - expected} bytes behind its last tensor: download it again")
    return {tensor.name: tensor for _, _, tensor in spans}


def _tensor_info(path: Path, name: str, entry: Any, data_begin: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        valid = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry {entry!r}: download it again")
    if dtype not in _BITS:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}; known: {', '.join(_BITS)}")
    return TensorInfo(name, dtype, shape, path, data_begin + begin)
