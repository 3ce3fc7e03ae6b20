"""Model outputs on disk, as token ids: what draft heads are counted, trained and judged on.

A file of JSON lines. The first line says how the outputs were made, every other one is an output; `README.md` beside
this module has the fields. Lines are only ever appended, so that a run which is killed leaves whole lines and at most
one that is cut short, which the next run removes.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

FORMAT = "qwen38-outputs-1"


@dataclasses.dataclass(frozen=True)
class Output:
    """What the model answered to one prompt.

    Attributes:
      index: of the prompt in its file, from 0.
      source: the prompt's tag; "" without one.
      prompt_ids, output_ids: token ids; the stop id that ended an output is its last.
      finish_reason: "stop" or "length".
      seed: that the output was sampled with.
    """

    index: int
    source: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: str
    seed: int

    def moved(self, by: int) -> "Output":
        """The same under an index that is higher by so much, to stand beside another file's."""
        return dataclasses.replace(self, index=self.index + by)


def read_header(path: Path) -> dict[str, Any]:
    """The first line of a file of outputs. Raises ValueError if there is none, or it is of another format."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        header = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of outputs: its first line must have the format {FORMAT!r}")
    return header


def read_outputs(path: Path) -> Iterator[Output]:
    """The outputs of a file, one at a time. A last line that was cut short, by a run that died, is left out.

    Raises:
      ValueError: the file is of another format, or a whole line is no output; the message has its number.
    """
    read_header(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number > 1 and line.endswith(b"\n"):
                yield _parse(line, f"{path}:{number}")


def _parse(line: bytes, where: str) -> Output:
    try:
        fields = json.loads(line)
        output = Output(**{**fields, **{k: tuple(fields[k]) for k in ("prompt_ids", "output_ids")}})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: no output ({type(error).__name__}: {error}): the file is damaged") from None
    if not all(type(i) is int and i >= 0 for i in (output.index, *output.prompt_ids, *output.output_ids)):
        raise ValueError(f"{where}: ids must be integers of at least 0: the file is damaged")
    return output


@dataclasses.dataclass(frozen=True)
class OutputFile:
    """A file that outputs are appended to, and the indices of those that it has already."""

    file: BinaryIO
    done: frozenset[int]

    def append(self, outputs: Sequence[Output]) -> None:
        """Adds lines, which survive whatever happens after the call."""
        self.file.write(b"".join(json.dumps(dataclasses.asdict(o)).encode() + b"\n" for o in outputs))
        self.file.flush()
        os.fsync(self.file.fileno())


@contextlib.contextmanager
def open_outputs(path: Path, header: Mapping[str, Any]) -> Iterator[OutputFile]:
    """Opens a new file, or one that an earlier run with the same header has begun: what was cut short there is removed.

    Raises:
      ValueError: the file is damaged, of another run, or in use by another process.
    """
    header = json.loads(json.dumps({"format": FORMAT, **header}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is in use by another process: wait for it, or end it") from None
        _cut_unfinished_line(file)
        if file.tell() == 0:
            file.write(json.dumps(header).encode() + b"\n")
            file.flush()
        found = read_header(path)
        differing = sorted(key for key in found.keys() | header.keys() if found.get(key) != header.get(key))
        if differing:
            raise ValueError(f"{path} was begun with another {', '.join(differing)}: repeat that run, or remove it")
        done = [output.index for output in read_outputs(path)]
        if len(set(done)) < len(done):
            raise ValueError(f"{path} has outputs twice: it is not the work of one run at a time; remove it")
        yield OutputFile(file, frozenset(done))


def _cut_unfinished_line(file: BinaryIO) -> None:
    """Leaves the file at its end, behind its last whole line."""
    end = file.seek(0, os.SEEK_END)
    kept = end
    while kept > 0:
        begin = max(0, kept - (1 << 16))
        file.seek(begin)
        newline = file.read(kept - begin).rfind(b"\n")
        if newline >= 0:
            kept = begin + newline + 1
            break
        kept = begin
    file.truncate(kept)
    file.seek(kept)
