"""Writes safetensors files tensor by tensor, and a checkpoint directory all at once."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from qwen38_jax.checkpoint.files import DTYPES, INDEX, SINGLE, CheckpointError, require_tokenizer

CODES = {name: code for code, name in DTYPES.items()}

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `rows()` yields it as consecutive arrays, made when they are needed."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int, ...]
    rows: Callable[[], Iterable[np.ndarray]]

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def plan_shards(tensors: Iterable[NewTensor], shard_bytes: int) -> dict[str, list[NewTensor]]:
    """File name -> tensors, in the given order; a file takes tensors up to `shard_bytes`, and at least one."""
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, got {shard_bytes}")
    shards: list[list[NewTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_shards(
    directory: Path,
    shards: Mapping[str, Sequence[NewTensor]],
    *,
    workers: int = 1,
    written: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Writes the planned files, and the index when there is more than one.

    Args:
      workers: threads, each with a tensor of its own; the files do not depend on their number.
      written: called with the bytes of each finished tensor.

    Raises:
      CheckpointError: the disk has less free space than the files need; nothing is written.
    """
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    free = shutil.disk_usage(directory).free
    if total > free:
        raise CheckpointError(
            f"the weights need {total:,} bytes, the disk of {directory.parent} has {free:,} free: "
            "make room, or choose another disk"
        )
    places = [
        (tensor, directory / file_name, offset)
        for file_name, shard in shards.items()
        for tensor, offset in _begin_safetensors(directory / file_name, shard)
    ]
    places.sort(key=lambda place: -place[0].nbytes)  # or the last thread would write the largest alone
    pool = ThreadPoolExecutor(workers)
    try:
        jobs = {pool.submit(_write_tensor, *place): place[0] for place in places}
        for job in as_completed(jobs):
            job.result()
            written(jobs[job].nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
    if len(shards) > 1:
        weight_map = {tensor.name: file_name for file_name, shard in shards.items() for tensor in shard}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_safetensors(path: Path, tensors: Sequence[NewTensor]) -> None:
    """Writes one file."""
    for tensor, offset in _begin_safetensors(path, tensors):
        _write_tensor(tensor, path, offset)


def _begin_safetensors(path: Path, tensors: Sequence[NewTensor]) -> list[tuple[NewTensor, int]]:
    """Writes the header of a file, and says at which byte of the file each tensor belongs.

    The library's own writer wants all tensors in memory at once; this one a few rows of each.
    """
    # Wide types first: every tensor is then aligned to its item size, which some readers need.
    tensors = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins = list(itertools.accumulate((tensor.nbytes for tensor in tensors), initial=0))[:-1]
    for tensor, begin in zip(tensors, begins, strict=True):
        span = [begin, begin + tensor.nbytes]
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return [(tensor, 8 + len(text) + begin) for tensor, begin in zip(tensors, begins, strict=True)]


def _write_tensor(tensor: NewTensor, path: Path, offset: int) -> None:
    """Writes a tensor into its place of a file, which other threads write to as well."""
    left = tensor.nbytes
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        for rows in tensor.rows():
            if rows.dtype.name != tensor.dtype:
                raise ValueError(f"tensor {tensor.name!r} was announced as {tensor.dtype}, got {rows.dtype}")
            data = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
            left -= len(data)
            if left < 0:
                break
            while data:
                data = data[file.write(data) :]
    if left:
        raise ValueError(f"tensor {tensor.name!r} was announced with {tensor.nbytes} bytes, got {tensor.nbytes - left}")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copies tokenizer and chat template; CheckpointError when `source` has no tokenizer.json."""
    require_tokenizer(source)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


@contextlib.contextmanager
def new_directory(destination: str | Path) -> Iterator[Path]:
    """A directory to fill, which takes the name `destination` only when the block ends without an exception.

    Raises:
      CheckpointError: `destination` exists and is not an empty directory.
    """
    destination = Path(destination).absolute()
    require_new(destination)
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def require_new(destination: Path) -> None:
    """Raises CheckpointError if something is there already, other than an empty directory."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination} exists and is not an empty directory: remove it or choose another name")


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
