"""Writes the card, README.md, of a small checkpoint from the records of its training and of its measurement.

    python -m scripts.make_card                               the checkpoint that ships
    python -m scripts.make_card --checkpoint DIR --run DIR    another one

Every number comes from a file: from the last record of experiments/results/tiny_checkpoint.jsonl, which must be of
these weights (scripts/measure_tiny.py), and from what the training run left: log.jsonl, held_out.json and, where there
is one, data.json.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.harness import RESULTS, ROOT, read_records
from qwen38_jax.checkpoint.load import read_config
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.evaluation.figures import figures_table, markdown, tasks_table
from qwen38_jax.params import shapes
from qwen38_jax.training.loop import read_log
from scripts.measure_tiny import QUESTION, TRAINING_RUN, weights_hash

RECORDS = RESULTS / f"{QUESTION}.jsonl"
CURVE_POINTS = 10

INTRODUCTION = """\
# The small checkpoint of qwen38_jax

{parameters:.1f} M parameters in {dtype}: {layers} layers in groups of {linear} Gated DeltaNet and one gated attention,
{vocabulary:,} tokens of vocabulary, untied head, MTP head, chat template with thinking on and off, {context:,} tokens
of context. The architecture is that of Qwen3.8-27B in every respect but size; `transformers` loads the directory as it
is. It is made for tests, demos and ablations: what it writes is as predictable as its text is. It copies and changes
what stands in its prompt; it knows nothing but Python's documentation and library source, and not much of that.

```python
from qwen38_jax import Engine, Request

engine = Engine.from_checkpoint()
[completion] = engine.generate([Request(messages=[{{"role": "user", "content": "Copy this: blue_harbor/42"}}])])
```

This page is written by `python -m scripts.make_card`; its numbers come from records and are not typed.
"""

MEASURED = """\
## Measured

Greedy, {dtype}, on {device} with jax {jax} and Python {python} (`{command}`
at commit {commit:.10}), about the {held_out_documents} documents that are held out by {split} split.{quick}

{figures}

* **Wrong tokens**: the edit distance between the ids of the answer and of the right one, both with the id that ends
  them. One inserted token is one wrong token.
  {documents}
* **Bodies that parse**: a held-out module up to and with a function's header and docstring is continued by
  {function_tokens} tokens. The body ends where a line is dedented; one that is still growing is cut behind its last
  complete statement, found from brackets, quotes and indentation alone. It must hold a statement, and `ast.parse` must
  take all of it. The {order}-gram model (interpolated absolute discounting) has the same training documents and the
  same prompts.
* **MTP acceptance**: how often the MTP head's first draft is the token that the model chose, along its own greedy
  answers: to tasks of every family, to the beginnings of held-out prose, and to the modules above.
{left}
Questions of every family of tasks, read teacher-forced; a family's answers that are right throughout are those that
greedy decoding gets exactly right:

{tasks}
"""

TRAINED = """\
## Trained

{steps:,} steps of `scripts/train_tiny.py`{where}.
Trunk and MTP head together, bf16 with fp32 masters. Loss in nats a token at some steps, out of `{log}`:

{curve}
{picture}
On held-out rows, at the end: {held_out}.
"""


class CardError(ValueError):
    """Records that are missing or were made for something else."""


def make_card(checkpoint: Path, run: Path, records: Path) -> str:
    """The card's text.

    Raises CardError if a file is missing or the last record is not of these weights.
    """
    record = _last_record(records, checkpoint)
    parts = [_introduction(checkpoint), _measured(record), *_data(run), _trained(run, checkpoint)]
    return "\n".join(parts)


def _last_record(path: Path, checkpoint: Path) -> dict[str, Any]:
    records = read_records(path) if path.exists() else []
    if not records:
        raise CardError(f"{path} has no record: run scripts/measure_tiny.py first")
    found, expected = records[-1]["settings"]["weights_sha256"], weights_hash(checkpoint)
    if found != expected:
        raise CardError(
            f"the last record of {path} is of weights {found[:12]}, but {checkpoint} has {expected[:12]}: "
            "run scripts/measure_tiny.py again"
        )
    return records[-1]


def _introduction(checkpoint: Path) -> str:
    _, _, cfg = read_config(checkpoint)
    return INTRODUCTION.format(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(shapes(cfg))) / 1e6,
        dtype=cfg.dtype,
        layers=cfg.num_hidden_layers,
        linear=cfg.linear_per_group,
        vocabulary=cfg.vocab_size,
        context=cfg.max_position_embeddings,
    )


def _measured(record: Mapping[str, Any]) -> str:
    results, settings = record["results"], record["settings"]
    quick = " **A quick run: these figures are of few trials and say little.**" if settings["quick"] else ""
    names = {"reproduce_2k": "2k", "reproduce_6k": "6k"}
    mixes = [f"of {name} tokens {_mix(results[key])}" for key, name in names.items() if results[key]]
    return MEASURED.format(
        **{name: record[name] for name in ("device", "jax", "python", "command", "commit")},
        **{name: settings[name] for name in ("dtype", "held_out_documents", "split")},
        quick=quick,
        figures=figures_table(results),
        tasks=tasks_table(results),
        documents=f"The documents: {'; '.join(mixes)}; the others are lines of longer ones." if mixes else "",
        function_tokens=settings["trials"]["function_tokens"],
        order=results["continuation"]["ngram_order"],
        left=_old_names(results["rename"]),
    )


def _old_names(renames: Mapping[str, Any] | None) -> str:
    if renames is None:
        return ""
    return f"* **Renames**: in {renames['old_name_left']:.0%} of the answers the old name still stood somewhere.\n"


def _mix(figures: Mapping[str, Any]) -> str:
    kinds = " and ".join(f"{n} of {kind}" for kind, n in figures["kinds"].items())
    return f"{kinds}, {figures['whole_documents']} of them whole files"


def _data(run: Path) -> list[str]:
    """What the run learned from; nothing if it left no data.json."""
    path = run / "data.json"
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    splits = [(name, f"{c['documents']:,}", f"{c['characters']:,}") for name, c in data["corpus"].items()]
    shares = [(name, f"{100 * share:g} %") for name, share in data["mixture"].items()]
    return [
        "## Data\n",
        f"What a Python {data['python']} installation brings along: reference prose, standard-library source and its "
        "docstrings,\nsplit by file. No copy of a held-out document is in the training documents.\n",
        markdown([("split", "documents", "characters"), *splits]) + "\n",
        "Plain text, and tasks in chat format that are made from these documents:\n",
        markdown([("text or task", "share of tokens"), *shares]) + "\n",
        *_settings(_plan(run)),
    ]


def _plan(run: Path) -> dict[str, Any]:
    """The settings of the run and the machine that it ran on; empty if it left no plan.json."""
    path = run / "plan.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _settings(plan: Mapping[str, Any]) -> list[str]:
    """The plan's stages as a table, and its other plain values."""
    if not plan:
        return []
    stages = [[f"{value:,}" for value in stage.values()] for stage in plan["stages"]]
    tokens = sum(math.prod(stage.values()) for stage in plan["stages"])
    plain = [
        f"{name} {value}"
        for name, value in plan.items()
        if isinstance(value, int | float | str) and name not in ("commit", "device", "devices")
    ]
    return [
        f"{tokens / 1e6:,.0f} M tokens in stages of `steps` batches of `rows` rows of `length` tokens:\n",
        markdown([list(plan["stages"][0]), *stages]) + "\n",
        f"Settings: {', '.join(plain)}.\n",
    ]


def _trained(run: Path, checkpoint: Path) -> str:
    picture = run / "loss.png"
    try:
        log, held_out = read_log(run / "log.jsonl"), json.loads((run / "held_out.json").read_text())
    except FileNotFoundError as error:
        raise CardError(f"{error.filename} is missing: copy it from the directory of the training run") from None
    names = [name for name in ("loss", "mtp_loss") if name in log[0]]
    rows = [log[i] for i in np.unique(np.linspace(0, len(log) - 1, CURVE_POINTS).round().astype(int))]
    curve = [[f"{row['step']:,}", *(f"{row[name]:.3f}" for name in names)] for row in rows]
    plan = _plan(run)
    return TRAINED.format(
        steps=log[-1]["step"],
        where=" at commit {commit:.10}, on {devices} {device}".format(**plan) if plan.get("commit") else "",
        curve=markdown([["step", *names], *curve]),
        log=f"{_relative(run)}/log.jsonl",
        picture=f"\n![loss curves]({os.path.relpath(picture, checkpoint)})\n" if picture.exists() else "",
        held_out=", ".join(f"{name} {value:.3f}" for name, value in held_out.items()),
    )


def _relative(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else path.name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", default=SHIPPED_CHECKPOINT, help="default: the one that ships")
    add("--run", type=Path, metavar="DIR", default=TRAINING_RUN, help="of its training; default: %(default)s")
    add("--records", type=Path, metavar="FILE", default=RECORDS, help="of its measurement; default: %(default)s")
    args = parser.parse_args(argv)
    try:
        card = make_card(args.checkpoint, args.run, args.records)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    temporary = args.checkpoint / "README.md.partial"
    temporary.write_text(card, encoding="utf-8")
    os.replace(temporary, args.checkpoint / "README.md")
    print(f"wrote {args.checkpoint / 'README.md'}")


if __name__ == "__main__":
    main()
