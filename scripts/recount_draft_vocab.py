"""Counts which tokens the model's outputs consist of, and picks those that a draft head should have.

    python -m scripts.recount_draft_vocab count outputs.jsonl ... --counts counts.npy
    python -m scripts.recount_draft_vocab choose counts.npy ... --size 40960 --out ids.json --held-out held_out.jsonl
    python -m scripts.recount_draft_vocab compare ids_a.json ids_b.json held_out.jsonl ...

`count` may be run on each shard of a corpus; `choose` adds the counts up. Stop, think, tool and chat ids are always in
the list. It is written as JSON or, with a name ending in .pt, as `torch.save` writes it; `prepare_checkpoint
--draft-vocab` cuts the head to it. `compare` also takes published lists. Figures are printed as JSON.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from qwen38_jax.checkpoint.draft_ids import read_vocabulary, write_draft_ids
from qwen38_jax.checkpoint.load import read_config
from qwen38_jax.checkpoint.write import write_json
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab.draft_vocab import SIZES, choose_ids, compare_lists, count_files, coverage, coverage_by_size
from qwen38_jax.lab.outputs import Output, read_header, read_outputs
from qwen38_jax.tokenizer import Tokenizer


def always_drafted(checkpoint: Path) -> list[int]:
    """Ids of the added tokens (stop, think, tool, chat) and the stop ids of the generation config."""
    _, _, cfg = read_config(checkpoint)
    return sorted({*Tokenizer.from_directory(checkpoint).added_ids.values(), *cfg.eos_token_ids})


def read_all(paths: Sequence[Path]) -> Iterator[Output]:
    return chain.from_iterable(map(read_outputs, paths))


def count(args: argparse.Namespace) -> dict[str, Any]:
    vocab_sizes = {read_header(path)["vocab_size"] for path in args.outputs}
    if len(vocab_sizes) > 1:
        raise ValueError(f"the files are of models with vocabularies of {sorted(vocab_sizes)} ids: count them apart")
    counts, tokens = count_files(args.outputs, vocab_sizes.pop(), prompts=args.prompts)
    save_counts(args.counts, counts)
    return {"counts": str(args.counts), "tokens": tokens, "different": int((counts > 0).sum())}


def save_counts(path: Path, counts: np.ndarray) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        np.save(file, counts)
    os.replace(partial, path)


def load_counts(paths: Sequence[Path]) -> np.ndarray:
    """The sum of all counts, `[V]` int64; ValueError for files that hold none, or of different vocabularies."""
    arrays = [np.load(path) for path in paths]
    if len({a.shape for a in arrays}) > 1 or any(a.ndim != 1 or a.dtype != np.int64 for a in arrays):
        raise ValueError(f"{', '.join(map(str, paths))} are not counts of one vocabulary: [V] int64, as count writes")
    return np.sum(arrays, axis=0)


def choose(args: argparse.Namespace) -> dict[str, Any]:
    counts, always = load_counts(args.counts), always_drafted(args.checkpoint)
    ids = choose_ids(counts, args.size, always)
    partial = args.out.with_name(f".{args.out.name}.partial")
    if args.out.suffix == ".pt":
        write_draft_ids(partial, ids)
    else:
        partial.write_text(json.dumps(ids.tolist()) + "\n")
    os.replace(partial, args.out)
    figures = {
        "ids": str(args.out),
        "size": len(ids),
        "always": len(always),
        "counted_tokens": int(counts.sum()),
        "never_counted": int((counts[ids] == 0).sum()),
    }
    if args.held_out:
        held_out, _ = count_files(args.held_out, len(counts))
        figures["held_out"] = coverage(ids, read_all(args.held_out), len(counts))
        figures["held_out_by_size"] = coverage_by_size(counts, always, held_out, args.sizes)
    if args.report:
        write_json(args.report, figures)
    return figures


def compare(args: argparse.Namespace) -> dict[str, Any]:
    vocab_size = read_header(args.outputs[0])["vocab_size"]
    lists = [read_vocabulary(path, vocab_size) for path in (args.a, args.b)]
    counts, _ = count_files(args.outputs, vocab_size)
    by_source = [coverage(ids, read_all(args.outputs), vocab_size)["by_source"] for ids in lists]
    return {"a": str(args.a), "b": str(args.b), **compare_lists(*lists, counts), "by_source": by_source}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser("count", help="count the ids of outputs")
    verb.add_argument("outputs", type=Path, nargs="+", metavar="OUTPUTS.jsonl")
    verb.add_argument("--counts", type=Path, required=True, metavar="FILE.npy")
    verb.add_argument("--prompts", action="store_true", help="count the prompts, too")
    verb.set_defaults(run=count)
    verb = verbs.add_parser("choose", help="pick the most frequent ids")
    verb.add_argument("counts", type=Path, nargs="+", metavar="COUNTS.npy")
    verb.add_argument("--size", type=int, required=True, metavar="N", help="ids in the list")
    verb.add_argument("--out", type=Path, required=True, metavar="IDS.json|.pt")
    verb.add_argument("--checkpoint", type=Path, metavar="DIR", default=SHIPPED_CHECKPOINT, help="for its special ids")
    verb.add_argument("--held-out", type=Path, nargs="+", metavar="OUTPUTS.jsonl", help="report coverage of these")
    verb.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="report the coverage at these")
    verb.add_argument("--report", type=Path, metavar="FILE.json", help="write the figures there, too")
    verb.set_defaults(run=choose)
    verb = verbs.add_parser("compare", help="compare two lists on outputs")
    verb.add_argument("a", type=Path, metavar="IDS_A")
    verb.add_argument("b", type=Path, metavar="IDS_B")
    verb.add_argument("outputs", type=Path, nargs="+", metavar="OUTPUTS.jsonl")
    verb.set_defaults(run=compare)
    args = parser.parse_args(argv)
    try:
        print(json.dumps(args.run(args), indent=2))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
