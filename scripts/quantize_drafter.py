"""Rounds a DFlash2 drafter or an MTP head to int4, by GPTQ on what its own matrices read, and compares the ways.

    python -m scripts.quantize_drafter states/ drafter-int4 --drafter runs/dflash2/drafter --held-out held_out/
    python -m scripts.quantize_drafter states/ checkpoint-mtp-int4 --held-out held_out/

Without --drafter it is the MTP head of the checkpoint, and what is written a whole checkpoint with that head. `states`
are calibrated on. With --held-out the ways are compared there: floats, rounding to the nearest, GPTQ, GPTQ with `fc` in
floats and, for DFlash2, with keys and values calibrated on the text's rows as well as on the block's. What is written
is by GPTQ. Records go to experiments/results/quantize_drafter.jsonl.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.harness import append, new_record, table
from qwen38_jax.checkpoint import Checkpoint, export_checkpoint, export_drafter, load_checkpoint, load_drafter
from qwen38_jax.checkpoint.files import weights_hash
from qwen38_jax.checkpoint.write import require_new
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab.capture import Captured
from qwen38_jax.lab.judging import Drafter, dflash2_drafts, judge, mtp_drafts
from qwen38_jax.lab.quantisation import (
    Inputs,
    Recipe,
    calibrate,
    dflash2_inputs,
    mtp_inputs,
    quantise_dflash2,
    quantise_mtp,
)
from qwen38_jax.lab.runs import open_states
from qwen38_jax.params import tree_bytes
from qwen38_jax.quantization.gptq import Hessian

QUESTION = "quantize_drafter"
COLUMNS = (
    "drafter",
    "method",
    "keep_fc=fc in floats",
    "blend_context=k, v on text too",
    "tokens_per_step=tokens a step",
    "chain=accepted",
    "nbytes=bytes",
)
ANCHORS = 32  # of a piece of text


class Job(NamedTuple):
    """One kind of drafter: what its matrices read, rounding, judging and writing it, and the ways that make sense."""

    name: str
    floats: Any
    fields: tuple[str, ...]
    collect: Callable[..., Inputs]
    quantise: Callable[[dict[str, Hessian], Recipe], Any]
    drafts: Callable[[Any], Drafter]
    write: Callable[[Any, Path], None]
    recipes: tuple[Recipe, ...]


def dflash2_job(checkpoint: Checkpoint, drafter: Path, size: int, recipe: Recipe) -> Job:
    params, cfg = load_drafter(drafter, dtype=checkpoint.cfg.dtype)

    def collect(tokens, taps, anchors):
        return dflash2_inputs(params, cfg, checkpoint.params, tokens, taps.astype(cfg.dtype), anchors)[1]

    return Job(
        "dflash2",
        params,
        ("tokens", "taps"),
        collect,
        lambda hessians, way: quantise_dflash2(params, cfg, hessians, way),
        lambda made: dflash2_drafts(made, cfg, checkpoint.params, real_vocab_size=size),
        lambda made, path: export_drafter(path, made, cfg),
        (recipe, *ways(recipe), dataclasses.replace(recipe, blend_context=True)),
    )


def mtp_job(checkpoint: Checkpoint, size: int, recipe: Recipe, drafts: int) -> Job:
    params, cfg = checkpoint.params, checkpoint.cfg

    def collect(tokens, hidden, anchors):
        return mtp_inputs(params, cfg, tokens, hidden.astype(cfg.dtype))[1]

    def write(head, path):
        export_checkpoint(
            path,
            params.replace(mtp=head),
            cfg,
            draft_head=checkpoint.draft_head,
            hf_config=checkpoint.hf_config,
            generation_config=checkpoint.generation_config,
            prefix=checkpoint.prefix,
            copy_from=checkpoint.path,
        )

    return Job(
        "mtp",
        params.mtp,
        ("tokens", "hidden"),
        collect,
        lambda hessians, way: quantise_mtp(params.mtp, hessians, way),
        lambda made: mtp_drafts(
            params.replace(mtp=made), cfg, drafts, head=checkpoint.draft_head, real_vocab_size=size
        ),
        write,
        (recipe, *ways(recipe)),
    )


def ways(recipe: Recipe) -> tuple[Recipe, ...]:
    """Those that a recipe is compared with."""
    return dataclasses.replace(recipe, method="rtn"), dataclasses.replace(recipe, keep_fc=True)


def pieces(captured: Captured, fields: tuple[str, ...], count: int, length: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Ends of texts, `[1, length, ...]` of each field, and anchors among their output tokens; at most `count`."""
    texts = [t for t in captured.texts if t.rows >= length and t.rows - t.prompt >= 2]
    if not texts:
        raise ValueError(f"no captured text has {length} tokens: take fewer with --length")
    rng = np.random.default_rng(0)
    for i in rng.permutation(len(texts))[:count]:
        begin = texts[i].rows - length
        anchors = rng.integers(max(texts[i].prompt - begin, 0), length - 1, ANCHORS).astype(np.int32)
        yield (*(np.array(captured.rows(texts[i], name, begin))[None] for name in fields), anchors)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Quantises and writes; the records of the comparison."""
    require_new(args.out)
    directory = args.checkpoint or SHIPPED_CHECKPOINT
    identity = weights_hash(directory)
    checkpoint = load_checkpoint(directory, dtype=args.dtype)
    captured = open_states(args.states, identity)
    size, recipe = captured.manifest["real_vocab_size"], Recipe(bits=args.bits, group=args.group)
    if args.drafter is None:
        job = mtp_job(checkpoint, size, recipe, args.verify_tokens)
    else:
        job = dflash2_job(checkpoint, args.drafter, size, recipe)
    hessians = calibrate(job.collect, pieces(captured, job.fields, args.pieces, args.length))
    records = []
    if args.held_out is not None:
        held_out = open_states(args.held_out, identity)
        for way in (None, *job.recipes):
            made = job.floats if way is None else job.quantise(hessians, way)
            found = judge(job.drafts(made), held_out, [args.verify_tokens])["all"]
            how = {"method": "floats"} if way is None else dataclasses.asdict(way)
            settings = {"drafter": job.name, "checkpoint": identity[:12], "verify_tokens": args.verify_tokens, **how}
            of_k = found["verify"][args.verify_tokens]
            results = {"nbytes": tree_bytes(made), "chain": found["chain"], "accepted": of_k["accepted"]}
            about = {"tokens_per_step": of_k["tokens_per_step"], "results": results}
            records.append(new_record(QUESTION, weights="trained", settings=settings, **about))
    job.write(job.quantise(hessians, recipe), args.out)
    return records


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("states", type=Path, metavar="STATES", help="captured states to calibrate on")
    add("out", type=Path, metavar="OUT", help="a new directory")
    add("--checkpoint", type=Path, metavar="DIR", help="the model (default: the one that ships)")
    add("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter; without it the MTP head is meant")
    add("--held-out", type=Path, metavar="STATES", help="compare the ways on these")
    add("--bits", type=int, choices=(4, 8), default=4, help="%(default)s")
    add("--group", type=int, default=128, metavar="N", help="columns that share a scale, halved until they fit")
    add("--pieces", type=int, default=128, metavar="N", help="of texts to calibrate on (%(default)s)")
    add("--length", type=int, default=256, metavar="N", help="tokens of each (%(default)s)")
    add("--verify-tokens", type=int, default=7, metavar="K", help="drafts of a step when judging (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's own")
    args = parser.parse_args(argv)
    try:
        records = run(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    for record in records:
        append(record)
    if records:
        print(table(records, COLUMNS))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
