"""Does a tree of drafts yield more tokens a step than a chain of as many rows?

    python -m experiments.tree_drafts --export tree.json

How often each of a drafter's likeliest tokens is right, at every depth, is measured along the model's own answers to
half of the prompts; from that the best tree of every size is worked out. On the other half, teacher-forced along the
same answers, trees and chains of equal rows are compared. The tree with the most tokens a second is exported, for
`qwen38 generate --draft-tree`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.equality import requests
from experiments.harness import WEIGHTS, Timing, append, new_record, table
from qwen38_jax.checkpoint import load_drafter
from qwen38_jax.drafters.interface import Drafter
from qwen38_jax.drafters.modes import make_drafter
from qwen38_jax.engine import Engine
from qwen38_jax.evaluation.forced import forced_acceptance
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.tree import MAX_DRAFTS, Tree, best_tree, expected_tokens

QUESTION = "tree_drafts"
DEPTH, RANKS = 5, 6  # of the comb, which is as large as a block can be
COLUMNS = (
    "shape",
    "rows",
    "depth",
    "tokens_per_step=tokens/step",
    "expected_tokens_per_step=expected",
    "ms_per_step=ms/step",
    "tokens_per_second=tok/s",
)


def comb(depth: int, ranks: int) -> Tree:
    """The likeliest tokens one after the other, and the next likeliest beside each of them."""
    paths = ((*(0,) * d, rank) for d in range(depth) for rank in range(ranks))
    return Tree(tuple(paths))


def acceptance_of(tree: Tree, steps: int, accepted: np.ndarray) -> list[list[float]]:
    """`[depth][rank]`: how often a comb's drafts were right where all before them were.

    Args:
      accepted: `[drafts]`, how often each draft of the comb was accepted in so many steps.
    """
    counts = dict(zip(tree.paths, accepted.tolist(), strict=True))
    table, tried = [], steps
    for depth in range(tree.depth):
        row = [counts[(*(0,) * depth, rank)] for rank in range(tree.ranks)]
        table.append([n / max(tried, 1) for n in row])
        tried = row[0]
    return table


def forced(engine: Engine, drafter: Drafter, spec: SpecConfig, texts: list[tuple]) -> tuple[int, np.ndarray, int]:
    """Steps along the texts, `[drafts]` accepted in them, and tokens emitted."""
    steps, accepted, tokens = 0, np.zeros(spec.verify_tokens, int), 0
    for prompt, answer in texts:
        counts = forced_acceptance(engine.params, engine.cfg, drafter, spec, prompt, answer)
        steps += int(counts.steps[0])
        accepted += counts.accepted[0].sum(axis=0)
        tokens += len(answer) - 1
    return steps, accepted, tokens


def seconds_of_step(engine: Engine, speculation: tuple[Drafter, SpecConfig], request, repeats: int) -> Timing:
    """Of the step as the engine runs it, without compiling."""
    other = Engine(engine.params, engine.cfg, engine.tokenizer, speculation=speculation)
    completions = [other.generate([request])[0] for _ in range(1 + repeats)][1:]
    return Timing(tuple(c.decode_seconds / c.steps for c in completions))


def shape_record(
    engine: Engine,
    shape: str,
    speculation: tuple,
    acceptance: list,
    asked: list,
    texts: list,
    settings: dict,
    repeats: int,
) -> dict[str, Any]:
    """The record of a tree or a chain."""
    drafter, spec = speculation
    steps, accepted, tokens = forced(engine, drafter, spec, texts)
    timing = seconds_of_step(engine, speculation, asked[0], repeats)
    results = {
        "tokens_per_second": tokens / steps / timing.median,
        "expected_tokens_per_step": None if spec.tree is None else expected_tokens(spec.tree, acceptance),
        "accepted_by_draft": accepted.tolist(),
        "steps": steps,
        "acceptance_by_depth_and_rank": acceptance,
    }
    depth = spec.verify_tokens if spec.tree is None else spec.tree.depth
    own = {
        "shape": shape,
        "rows": spec.verify_tokens + 1,
        "depth": depth,
        "paths": None if spec.tree is None else [list(path) for path in spec.tree.paths],
    }
    return new_record(
        QUESTION,
        weights=settings["weights"],
        settings={**own, **settings["own"]},
        results=results,
        tokens_per_step=tokens / steps,
        seconds_per_step=timing,
        prompts=[prompt for prompt, _ in texts],
        output_tokens=asked[0].sampling.max_new_tokens,
        thinking=False,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the one that ships")
    parser.add_argument("--weights", choices=WEIGHTS, help="what the checkpoint holds; needed with --checkpoint")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter (default: the MTP head)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="half of them to choose by (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of every answer (%(default)s)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[5, 8, 16, 32], metavar="N", help="of a block (5 8 16 32)"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every timing (%(default)s)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="where the best tree is written")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.weights is None):
        parser.error("--checkpoint and --weights go together: the checkpoint that ships is trained")
    if args.prompts < 2 or args.tokens < 2 or not all(2 <= rows <= MAX_DRAFTS + 1 for rows in args.rows):
        parser.error(f"--prompts and --tokens must be at least 2, --rows 2 to {MAX_DRAFTS + 1}")
    engine = Engine.from_checkpoint(args.checkpoint, dtype=args.dtype)
    mode = "mtp" if args.drafter is None else "dflash2"
    dflash2 = None if args.drafter is None else load_drafter(args.drafter, dtype=engine.cfg.dtype)

    def speculation(**options):
        return make_drafter(mode, engine.params, dflash2=dflash2, **options)

    asked = requests(args.prompts, args.tokens)
    answers = engine.generate(asked)
    texts = [(engine.encode(request), answer.token_ids) for request, answer in zip(asked, answers, strict=True)]
    tree = comb(DEPTH, RANKS)
    steps, accepted, _ = forced(engine, *speculation(tree=tree), texts[::2])
    acceptance = acceptance_of(tree, steps, accepted)
    settings = {
        "weights": args.weights or "trained",
        "own": {
            "speculate": mode,
            "checkpoint": args.checkpoint.name if args.checkpoint else "tiny",
            "drafter": args.drafter.name if args.drafter else None,
            "dtype": engine.cfg.dtype,
        },
    }
    shapes = []
    for rows in args.rows:
        if mode == "mtp":
            shapes.append(("chain", speculation(draft_tokens=rows - 1)))
        elif rows <= dflash2[1].block_size:
            shapes.append(("chain", speculation(verify_tokens=rows - 1)))
        shapes.append(("tree", speculation(tree=best_tree(acceptance, rows - 1))))
    records = []
    for shape, chosen in shapes:
        record = shape_record(engine, shape, chosen, acceptance, asked[1::2], texts[1::2], settings, args.repeats)
        append(record)
        records.append(record)
    print(table(records, COLUMNS))
    if args.export is not None:
        trees = [record for record in records if record["settings"]["shape"] == "tree"]
        best = max(trees, key=lambda record: record["results"]["tokens_per_second"])
        args.export.write_text(json.dumps(best["settings"]["paths"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
