"""The list of token ids beside a draft head: one int64 tensor in PyTorch's file format, without PyTorch.

Such a file is a zip archive of a pickle and of raw storages. The pickle may only name what a plain tensor needs, and
here these names stand for functions of ours: nothing that the file brings is ever run.
"""

import collections
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from qwen38_jax.checkpoint.files import CheckpointError

DRAFT_IDS = "mtp_draft_vocab_ids.pt"

_MAX_PICKLE = 1 << 16  # bytes; that of a tensor has a few hundred
_MAX_IDS = 1 << 24


def read_draft_ids(path: Path) -> np.ndarray:
    """The int64 `[n]` tensor of a file; n is at least 1.

    Raises:
      CheckpointError: no such file, not PyTorch's zip format, or anything but one contiguous int64 vector.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: it names the tokens of mtp.draft_lm_head; copy it, too") from None
    except Exception as error:  # a damaged archive or pickle raises nearly anything
        raise CheckpointError(
            f"{path} is not a vector of int64 as torch.save writes it ({error}): download it again"
        ) from error


def read_vocabulary(path: Path, vocab_size: int) -> np.ndarray:
    """Ascending int64 ids `[n]` from a JSON list or a file of `write_draft_ids`, in any order there.

    Raises:
      CheckpointError: no such file or list, an id twice or outside the vocabulary, or none at all.
    """
    if zipfile.is_zipfile(path):
        ids = read_draft_ids(path)
    else:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is no JSON list of token ids and no .pt file of them ({error})") from error
        if not isinstance(values, list) or not values or not all(type(i) is int and abs(i) < 1 << 63 for i in values):
            raise CheckpointError(f"{path} must hold a JSON list of one or more token ids")
        ids = np.array(values, np.int64)
    ids, counts = np.unique(ids, return_counts=True)
    if ids[0] < 0 or ids[-1] >= vocab_size:
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        raise CheckpointError(
            f"{path} names {len(outside)} ids outside the vocabulary of {vocab_size}, for example {outside[0]}: it was "
            "made for another model"
        )
    if counts.max() > 1:
        raise CheckpointError(f"{path} names {np.sum(counts > 1)} ids more than once, for example {ids[counts > 1][0]}")
    return ids


def write_draft_ids(path: Path, ids: np.ndarray) -> None:
    """Writes int64 `ids [n]` so that `torch.load` and `read_draft_ids` give them back."""

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()

    def name(module: str, attribute: str) -> bytes:
        return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()

    count = pickle.BININT + len(ids).to_bytes(4, "little")
    kind = text("storage") + name("torch", "LongStorage") + text("0") + text("cpu") + count
    storage = pickle.MARK + kind + pickle.TUPLE + pickle.BINPERSID
    size, stride = count + pickle.TUPLE1, pickle.BININT1 + b"\1" + pickle.TUPLE1
    hooks = name("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    arguments = storage + pickle.BININT1 + b"\0" + size + stride + pickle.NEWFALSE + hooks
    tensor = name("torch._utils", "_rebuild_tensor_v2") + pickle.MARK + arguments + pickle.TUPLE + pickle.REDUCE
    with zipfile.ZipFile(path, "w") as archive:

        def add(name: str, data: bytes | str) -> None:
            archive.writestr(zipfile.ZipInfo(name), data)  # of no date: the same ids make the same file

        add("archive/data.pkl", pickle.PROTO + b"\2" + tensor + pickle.STOP)
        add("archive/byteorder", "little")
        add("archive/data/0", np.asarray(ids, "<i8").tobytes())
        add("archive/version", "3\n")


def _read(archive: zipfile.ZipFile) -> np.ndarray:
    files = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if files["data.pkl"].file_size > _MAX_PICKLE:
        raise ValueError(f"its pickle has {files['data.pkl'].file_size} bytes")
    storage, offset, size, stride = _Unpickler(io.BytesIO(archive.read(files["data.pkl"]))).tensor()
    if offset != 0 or stride != (1,) or len(size) != 1 or not 1 <= size[0] <= _MAX_IDS:
        raise ValueError(f"the tensor has offset {offset}, shape {size}, strides {stride}")
    order = archive.read(files["byteorder"]).decode() if "byteorder" in files else "little"
    data = files[f"data/{storage}"]
    if data.file_size != 8 * size[0] or order not in ("little", "big"):
        raise ValueError(f"{data.file_size} bytes of {order}-endian data for {size[0]} ids")
    return np.frombuffer(archive.read(data), "<i8" if order == "little" else ">i8").astype(np.int64)


class _Unpickler(pickle.Unpickler):
    """Builds tuples in place of tensors and storages."""

    _NAMES = {
        ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, size, stride, *_: (
            storage,
            offset,
            size,
            stride,
        ),
        ("torch", "LongStorage"): "int64",
        ("collections", "OrderedDict"): collections.OrderedDict,  # of backward hooks
    }

    def tensor(self) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
        """Key of the storage, offset, size and stride."""
        match self.load():
            case (str(storage), int(offset), tuple(size), tuple(stride)):
                return storage, offset, size, stride
            case other:
                raise ValueError(f"it holds a {type(other).__name__}")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._NAMES[module, name]

    def persistent_load(self, pid: Any) -> str:
        match pid:
            case ("storage", "int64", str(key), str(), int()):
                return key
            case _:
                raise pickle.UnpicklingError(f"it refers to {pid!r}")
