"""What the trainers of both drafters share: their flags, the run directory, and batches for the one training loop."""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from qwen38_jax.checkpoint.files import CheckpointError, read_json
from qwen38_jax.checkpoint.write import write_json
from qwen38_jax.lab.capture import Captured, open_captured
from qwen38_jax.lab.windows import ResidentWindows, Windows
from qwen38_jax.params import Params
from qwen38_jax.training.loop import TrainConfig, TrainState, fit, read_log
from qwen38_jax.training.matrices import decayed, muon_dimensions

SETTINGS = "settings.json"


def add_flags(parser: argparse.ArgumentParser, *, steps: int, rate: float) -> None:
    """The flags of a training run."""
    add = parser.add_argument
    add("states", type=Path, metavar="STATES", help="directory of captured states")
    add("run", type=Path, metavar="RUN", help="directory of the run, made or resumed")
    add("--checkpoint", type=Path, metavar="DIR", help="the model that the states are of (default: the one that ships)")
    add("--steps", type=int, default=steps, metavar="N", help="%(default)s")
    add("--rate", type=float, default=rate, metavar="X", help="highest learning rate (%(default)s)")
    add("--warmup", type=int, metavar="N", help="steps of rising rate (default: 4 %% of the steps)")
    add("--optimizer", choices=("adamw", "muon"), default="muon", help="muon for matrices, or AdamW (%(default)s)")
    add("--weight-decay", type=float, default=0.01, metavar="X", help="%(default)s")
    add("--windows", type=int, default=8, metavar="N", help="pieces of texts in a batch (%(default)s)")
    add("--length", type=int, default=1024, metavar="N", help="rows of a piece (%(default)s)")
    add("--accumulate", type=int, default=1, metavar="N", help="parts in which a batch is worked through")
    add("--resident", action="store_true", help="keep all captured rows on the device instead of reading them")
    add("--dtype", choices=("float32", "bfloat16"), help="to compute in (default: the checkpoint's own)")
    add("--seed", type=int, default=0, metavar="N")
    add("--seconds", type=float, default=float("inf"), metavar="N", help="stop after about so long")
    add("--save-every", type=int, default=500, metavar="N", help="steps (%(default)s)")
    add("--plot", type=Path, metavar="PNG", help="draw the curves (needs the plots extra)")


def report(run: Callable[[argparse.Namespace], dict[str, Any]], args: argparse.Namespace) -> None:
    """Trains and prints the figures of the run as JSON; ends with a message where it cannot go on."""
    try:
        print(json.dumps(run(args)))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on from the last save") from None


def open_states(directory: Path, checkpoint: str) -> Captured:
    """Captured states of the model of that hash; CheckpointError if they are another's."""
    captured = open_captured(directory)
    if captured.manifest["checkpoint"] != checkpoint:
        raise CheckpointError(f"{directory} holds states of another model than the checkpoint: capture them again")
    return captured


def keep_settings(run: Path, settings: dict[str, Any]) -> None:
    """Writes what determines a run into its directory; ValueError when it was begun with something else."""
    run.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(settings))
    path = run / SETTINGS
    if path.exists() and (found := read_json(path)) != settings:
        differing = sorted(key for key in found.keys() | settings.keys() if found.get(key) != settings.get(key))
        raise ValueError(f"{run} was begun with another {', '.join(differing)}: repeat that, or take another directory")
    write_json(path, settings)


def settings_of(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The flags that determine a run, and more. Not the number of steps: a run may be given other ones on the way."""
    left_out = {"states", "run", "checkpoint", "steps", "seconds", "save_every", "plot", "resident"}
    return {key: value for key, value in vars(args).items() if key not in left_out} | more


def train(
    args: argparse.Namespace,
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]],
    init: Callable[[], Any],
    infos: Any,
    target: Params,
    captured: Captured,
    fields: tuple[str, ...],
    anchors: int = 0,
) -> TrainState:
    """Runs the training loop with `loss(params, target, *fields, *anchors)`; `infos` are the `ArrayInfo` of params."""
    parts = jax.device_count() * args.accumulate
    if args.windows % parts:
        raise ValueError(f"--windows {args.windows} must be a multiple of devices times --accumulate, {parts}")
    kind = ResidentWindows if args.resident else Windows
    windows = kind(captured, fields, args.length, args.windows, args.seed, anchors)
    frozen: tuple[Any, ...] = (target,)
    if args.resident:
        loss, frozen = functools.partial(_on_resident, loss, windows.gather), (target, windows.columns())
    config = TrainConfig(
        steps=args.steps,
        peak_rate=args.rate,
        final_rate=args.rate / 50,
        warmup_steps=min(round(0.04 * args.steps) if args.warmup is None else args.warmup, args.steps - 1),
        weight_decay=args.weight_decay,
        save_every=args.save_every,
        accumulate=args.accumulate,
    )
    muon = muon_dimensions(infos) if args.optimizer == "muon" else None
    state = fit(
        loss, init, windows, config, args.run, frozen=frozen, decays=decayed(infos), muon=muon, seconds=args.seconds
    )
    if args.plot:
        plot(args.run, args.plot)
    return state


def _on_resident(loss, gather, params, target, columns, begins, counts, *anchors):
    return loss(params, target, *gather(columns, begins, counts), *anchors)


def plot(run: Path, path: Path) -> None:
    """The curves of a run's log as a picture, one panel each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log = read_log(run / "log.jsonl")
    names = [name for name in log[0] if name not in ("step", "tokens_per_second")]
    figure, axes = plt.subplots(-(-len(names) // 3), 3, figsize=(10, 2.5 * -(-len(names) // 3)), squeeze=False)
    for name, panel in zip(names, axes.flat, strict=False):
        panel.plot([line["step"] for line in log], [line[name] for line in log])
        panel.set_title(name, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
