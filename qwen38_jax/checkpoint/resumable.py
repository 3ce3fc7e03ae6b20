"""Writes a directory shard by shard, so that a run that ends early goes on where it was."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen38_jax.checkpoint.files import CheckpointError, read_json
from qwen38_jax.checkpoint.write import NewTensor, require_new, write_json, write_safetensors


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file to be written.

    Attributes:
      file: its path within the directory.
      nbytes: of all tensors.
      make: makes the tensors and what there is to record about them; the same whenever it is called.
    """

    file: str
    nbytes: int
    make: Callable[[], tuple[list[NewTensor], dict[str, Any]]]


def write_resumably(
    destination: Path,
    shards: Sequence[Shard],
    identity: Mapping[str, Any],
    finish: Callable[[Path, dict[str, Any]], None],
    advance: Callable[[int], object],
) -> None:
    """Writes all shards, and what `finish(directory, records)` adds to them, into the new directory `destination`.

    The work is done in a hidden directory beside it, which is renamed when it is whole. If the run ends before that,
    however it ends, another with the same identity takes the shards that are finished as they are, and writes the same
    bytes as an unbroken run.

    Args:
      identity: what determines the bytes, ready for JSON.
      advance: called with the bytes of each shard that is done.

    Raises:
      CheckpointError: `destination` is not new or empty, the hidden directory belongs to other work or to another
        process, or the disk is full (before anything is written, or in the middle).
    """
    destination = destination.absolute()
    require_new(destination)
    work = destination.with_name(f".{destination.name}.unfinished")
    with _locked(work), _full_disk_told(destination):
        whole, records = work / "checkpoint", work / "records"
        whole.mkdir(exist_ok=True)
        _check_identity(work, whole, identity)
        _require_space(work, sum(shard.nbytes for shard in shards if not (whole / shard.file).exists()))
        made: dict[str, Any] = {}
        for shard in shards:
            record = records / f"{shard.file}.json"
            if not (whole / shard.file).exists():
                _write(work, whole / shard.file, record, shard)
            made |= read_json(record)
            advance(shard.nbytes)
        finish(whole, made)
        os.replace(whole, destination)
    shutil.rmtree(work)


def _write(work: Path, path: Path, record: Path, shard: Shard) -> None:
    """The record first: whatever happens between the two renames, a shard that is there has one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    partial = work / "shard"
    try:
        tensors, about = shard.make()
        write_safetensors(partial, tensors)
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # a shard under its name survives a power failure, too
        _replace_json(record, about)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _replace_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    write_json(partial, value)
    os.replace(partial, path)


def _check_identity(work: Path, whole: Path, identity: Mapping[str, Any]) -> None:
    path = work / "identity.json"
    if not any(whole.iterdir()):  # nothing to take over, whatever was tried before
        _replace_json(path, identity)
        return
    before, now = read_json(path), json.loads(json.dumps(identity))
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        raise CheckpointError(
            f"{work} holds an unfinished run that differs in {', '.join(differing)}: repeat that run, or remove it"
        )


def _require_space(work: Path, needed: int) -> None:
    free = shutil.disk_usage(work).free
    if needed > free:
        raise CheckpointError(
            f"{needed:,} bytes are still to be written, the disk of {work.parent} has {free:,} free: make room, or "
            "choose another disk"
        )


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Two runs into one directory would take each other's files for their own."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{work} is in use by another process: wait for it, or end it") from None
        yield


@contextlib.contextmanager
def _full_disk_told(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(
            f"the disk of {destination.parent} is full: make room and run the same command again, which keeps what is "
            "finished"
        ) from error
