"""What every experiment needs: a timer, the record of a measurement, and a table of records.

An experiment answers one question. It measures, appends one record a measurement to `results/<question>.jsonl`, and
prints a table. A table elsewhere is rendered from the same records:

    python -m experiments.harness table experiments/results/decode_speed.jsonl --columns groups "ms_per_step=ms a step"
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
WEIGHTS = ("trained", "random")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds that each repeat took; per step, where a repeat runs several."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    def spread_ms(self) -> dict[str, float]:
        """Extremes and quartiles in milliseconds."""
        values = 1000 * np.percentile(self.seconds, [0, 25, 75, 100])
        return dict(zip(("min", "q1", "q3", "max"), values.tolist(), strict=True))

    def summary(self) -> dict[str, float]:
        """What a record keeps of a timing that stands among its settings or results."""
        return {"median_ms": 1000 * self.median, **self.spread_ms(), "repeats": len(self.seconds)}


def measure(function: Callable, *args: Any, warmup: int = 2, repeats: int = 10) -> Timing:
    """Times `function(*args)` until its result is there: a jitted function, a compiled program, a whole program.

    The `warmup` calls before are not counted: what a jitted function compiles falls to them, so there must be one.
    For an argument that is donated use `measure_chain`.
    """
    return measure_chain(lambda _: function(*args), None, steps=1, warmup=warmup, repeats=repeats)[0]


def measure_chain(
    step: Callable[[Any], Any], state: Any, *, steps: int, warmup: int = 1, repeats: int = 5
) -> tuple[Timing, Any]:
    """Times `state = step(state)`, `steps` times in a row without waiting in between; `step` may donate its argument.

    On an accelerator the calls queue up, so the time a step takes is the device's own, unless the host is slower.

    Returns:
      The time of one step, and the state after all `(warmup + repeats) * steps` of them.
    """
    if min(steps, warmup, repeats) < 1:
        raise ValueError(f"steps, warmup and repeats must be at least 1, got {steps}, {warmup}, {repeats}")
    seconds = []
    for _ in range(warmup + repeats):
        began = time.perf_counter()
        for _ in range(steps):
            state = step(state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - began) / steps)
    return Timing(tuple(seconds[warmup:])), state


class Compilation(NamedTuple):
    """A compiled program, the time of tracing and lowering (Python), and the time of XLA's compilation."""

    program: jax.stages.Compiled
    lower: Timing
    compile: Timing

    @property
    def seconds(self) -> float:
        return self.lower.median + self.compile.median


def compile_cold(function: Callable, *args: Any, repeats: int = 1, **jit_options: Any) -> Compilation:
    """Compiles `jax.jit(function, **jit_options)` for `args` (arrays or `jax.ShapeDtypeStruct`s), without any cache."""
    lower, compile_ = [], []
    for _ in range(repeats):
        with without_compilation_caches():
            began = time.perf_counter()
            lowered = jax.jit(function, **jit_options).lower(*args)
            lower.append(time.perf_counter() - began)
            began = time.perf_counter()
            program = lowered.compile()
            compile_.append(time.perf_counter() - began)
    return Compilation(program, Timing(tuple(lower)), Timing(tuple(compile_)))


@contextlib.contextmanager
def without_compilation_caches() -> Iterator[None]:
    """Within, everything is traced and compiled anew; what is compiled there is not kept on disk either."""
    before = jax.config.jax_enable_compilation_cache
    jax.clear_caches()
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX looks at the setting once and remembers
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def new_record(
    question: str,
    *,
    weights: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any] | None = None,
    tokens_per_step: float | None = None,
    seconds_per_step: Timing | float | None = None,
    prompts: Sequence[Any] | None = None,
    output_tokens: int | None = None,
    thinking: bool | None = None,
    repeats: int | None = None,
    predicted_for: str | None = None,
) -> dict[str, Any]:
    """The record of one measurement: what was measured, on what, and how. What does not apply is None.

    Args:
      question: the experiment's name, which is also the name of its file of records.
      weights: "trained" or "random".
      settings, results: what was chosen and what came out, beside the fields below; `Timing`s are summarised.
      tokens_per_step: tokens that a sequence gains in a step, on average.
      seconds_per_step: kept as `ms_per_step`, with its spread and repeats if it is a `Timing`.
      prompts: texts, conversations or lists of ids; their hash is kept.
      output_tokens: length of each answer.
      predicted_for: name of the device that a prediction is for; None if the numbers were measured on this one.

    Raises:
      ValueError: a number is not finite, a value is not JSON, or a name is used twice.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {WEIGHTS}, got {weights!r}")
    if not re.fullmatch(r"\w+", question):
        raise ValueError(f"the question names a file: letters, digits and _ only, got {question!r}")
    timing = seconds_per_step if isinstance(seconds_per_step, Timing) else None
    seconds = timing.median if timing else seconds_per_step
    record = {
        "question": question,
        **provenance(),
        "weights": weights,
        "predicted_for": predicted_for,
        "prompt_set": None if prompts is None else prompt_set_hash(prompts),
        "output_tokens": output_tokens,
        "thinking": thinking,
        "repeats": len(timing.seconds) if timing else repeats,
        "tokens_per_step": tokens_per_step,
        "ms_per_step": None if seconds is None else 1000 * seconds,
        "ms_per_step_spread": timing.spread_ms() if timing else None,
        "settings": dict(settings),
        "results": dict(results or {}),
    }
    names = [*record, *record["settings"], *record["results"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"a table could not tell apart what is named twice: {', '.join(twice)}")
    return _to_json(record, question)


def prompt_set_hash(prompts: Sequence[Any]) -> str:
    """Tells sets of prompts apart: 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(prompts, ensure_ascii=False).encode()).hexdigest()[:12]


def append(record: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Adds the record to its question's file as one line, whole even when several processes write."""
    path = directory / f"{record['question']}.jsonl"
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    directory.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(file, line) < len(line):
            raise OSError(f"{path}: the last record is cut short; is the disk full?")
    finally:
        os.close(file)
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file. ValueError names the line that is not one."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a record: {error}") from None
    return records


def table(records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table, aligned for a terminal too.

    A column is the name of a field, setting or result, `a.b` of one within it, `name=Heading` under another heading.
    Records of random weights and predictions say so in a last column.

    Raises:
      ValueError: there are no records, or none has such a column.
    """
    records = list(records)
    names = [column.partition("=")[0] for column in columns]
    rows = [[column.partition("=")[2] or column for column in columns]]
    rows += [[_cell(_lookup(record, name)) for name in names] for record in records]
    known = {key for record in records for key in _flat(record)}
    if unknown := [name for name in names if name.split(".")[0] not in known]:
        raise ValueError(f"no record has {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    if any(notes := [_note(record) for record in records]):
        rows = [[*row, note] for row, note in zip(rows, ["note", *notes], strict=True)]
    widths = [max(3, *map(len, cells)) for cells in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def _note(record: Mapping[str, Any]) -> str:
    notes = ["random weights"] if record["weights"] == "random" else []
    if record["predicted_for"] is not None:
        notes.append(f"predicted for {record['predicted_for']}")
    return ", ".join(notes)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, **record["settings"], **record["results"]}


def _lookup(record: Mapping[str, Any], name: str) -> Any:
    value = _flat(record)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|")


def _to_json(value: Any, name: str) -> Any:
    """`value` in JSON's types; `name` is where it stands, for the error."""
    if isinstance(value, Timing):
        value = value.summary()
    elif hasattr(value, "tolist"):  # numpy and jax, scalars too
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}: a record holds finite numbers, or None where there is none")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{name} is a {type(value).__name__}, which a record cannot hold: {value!r}")


def provenance() -> dict[str, Any]:
    """Where the numbers come from: command, commit, time, machine and versions."""
    device = jax.devices()[0]
    commit, dirty = _commit()
    driver, power_limit = _driver() if device.platform == "gpu" else (None, None)
    return {
        "command": shlex.join(["python", *(word.replace(f"{ROOT}{os.sep}", "") for word in sys.orig_argv[1:])]),
        "commit": commit,
        "dirty": dirty,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "platform": device.platform,
        "driver": driver,
        "power_limit_watts": power_limit,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def _commit() -> tuple[str | None, bool | None]:
    """Commit, and whether the tree differs from it other than by results. A copy without git may set GIT_COMMIT."""
    try:
        [commit] = _output("git", "-C", ROOT, "rev-parse", "HEAD")
        return commit, bool(_output("git", "-C", ROOT, "status", "--porcelain", "--", ".", ":!experiments/results"))
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GIT_COMMIT"), None


def _driver() -> tuple[str | None, float | None]:
    """Driver version and power limit (W) of the first visible NVIDIA GPU, as far as nvidia-smi tells."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ("nvidia-smi", "-i", gpu, "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits")
    try:
        driver, power = _output(*query)[0].split(", ")
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return driver, None if "N/A" in power else float(power)


def _output(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _matches(record: Mapping[str, Any], condition: str) -> bool:
    name, _, wanted = condition.partition("=")
    value = _lookup(record, name)
    return wanted in (str(value), json.dumps(value))


def latest(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last of the records that measured the same thing on the same machine, in the order of the first."""
    identity = ("question", "device", "cpu", "weights", "predicted_for", "prompt_set", "thinking", "settings")
    return list({json.dumps([r[name] for name in identity], sort_keys=True): r for r in records}.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.harness")
    verb = parser.add_subparsers(required=True, metavar="VERB").add_parser("table", help="render records as Markdown")
    verb.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    verb.add_argument("--columns", nargs="+", required=True, metavar="NAME[=HEADING]")
    verb.add_argument("--where", nargs="+", default=[], metavar="NAME=VALUE", help="only records for which all hold")
    verb.add_argument("--latest", action="store_true", help="of repeated measurements only the last")
    args = parser.parse_args(argv)
    try:
        records = [record for path in args.files for record in read_records(path)]
        records = [record for record in records if all(_matches(record, condition) for condition in args.where)]
        print(table(latest(records) if args.latest else records, args.columns))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
