"""Captures what a frozen model makes of its outputs, for drafters to be trained on.

    python -m scripts.capture_hidden_states outputs.jsonl ... states/ --checkpoint DIR

Keeps, of every token of prompt and output, the hidden row after the final norm, the outputs of the tapped layers and
the highest logits; says first what that takes on disk. An interrupted run goes on when the same command is given again.
Texts that give rows which are not finite are left out and listed; the exit code is then 1. Prints a summary as JSON.
qwen38_jax/lab/README.md describes the directory.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import jax
from tqdm import tqdm

from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.checkpoint.files import weights_hash
from qwen38_jax.config import KERNELS
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab.capture import Layout, capture, default_taps, plan_capture
from qwen38_jax.lab.outputs import read_header, read_outputs
from qwen38_jax.tokenizer import Tokenizer


def check_origin(files: Sequence[Path], checkpoint: str) -> None:
    """Raises ValueError for outputs of another model: they may be captured, but only if one says so."""
    for path in files:
        if read_header(path)["checkpoint"] != checkpoint:
            raise ValueError(
                f"{path} holds outputs of another model than the checkpoint: generate them again, or add --foreign"
            )


def main(argv: Sequence[str] | None = None) -> None:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("outputs", type=Path, nargs="+", metavar="OUTPUTS.jsonl")
    add("directory", type=Path, metavar="STATES", help="a new directory")
    add("--checkpoint", type=Path, metavar="DIR", default=SHIPPED_CHECKPOINT, help="default: the one that ships")
    add("--dtype", choices=("float32", "bfloat16"), help="to run in and to keep (default: the checkpoint's own)")
    add("--kernels", choices=KERNELS, default="auto", help="whether to use the kernels (%(default)s)")
    add("--taps", type=int, nargs="*", metavar="LAYER", help="layers, 0 for the first (default: five, spread evenly)")
    add("--top", type=int, default=8, metavar="N", help="highest logits to keep (%(default)s)")
    add("--max-tokens", type=int, default=4096, metavar="N", help="leave out longer texts (%(default)s)")
    add("--batch", type=int, default=4 if on_cpu else 64, metavar="N", help="texts read at once (%(default)s)")
    add("--shard-rows", type=int, default=1 << 16, metavar="N", help="%(default)s")
    add("--verify", type=int, default=4, metavar="N", help="texts to compute again (%(default)s)")
    add("--foreign", action="store_true", help="take outputs that another model made")
    args = parser.parse_args(argv)
    try:
        identity = weights_hash(args.checkpoint)
        if not args.foreign:
            check_origin(args.outputs, identity)
        checkpoint = load_checkpoint(args.checkpoint, dtype=args.dtype)
        cfg = dataclasses.replace(checkpoint.cfg, kernels=args.kernels)
        taps = default_taps(cfg.num_hidden_layers) if args.taps is None else tuple(args.taps)
        layout = Layout(taps, args.top, args.shard_rows, args.batch)
        offset = 0
        files = []
        for path in args.outputs:  # indices are those of a prompt in its file
            own = list(read_outputs(path))
            files.append([o.moved(offset) for o in own])
            offset += 1 + max((o.index for o in own), default=0)
        plan = plan_capture(chain.from_iterable(files), cfg, layout, args.max_tokens)
        print(
            f"{sum(map(len, plan.shards))} texts in {len(plan.shards)} shards, {plan.nbytes:,} bytes; "
            f"{len(plan.left_out)} left out",
            file=sys.stderr,
        )
        with tqdm(total=plan.nbytes, unit="B", unit_scale=True) as progress:
            manifest = capture(
                checkpoint.params,
                cfg,
                plan,
                args.directory,
                layout,
                real_vocab_size=Tokenizer.from_directory(args.checkpoint).vocab_size,
                identity={
                    "checkpoint": identity,
                    "outputs": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in args.outputs},
                },
                verify=args.verify,
                advance=progress.update,
            )
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on from here") from None
    dropped = {i: why for shard in manifest["shards"].values() for i, why in shard["dropped"].items()}
    print(
        json.dumps(
            {
                "directory": str(args.directory),
                "texts": sum(len(shard["texts"]) for shard in manifest["shards"].values()),
                "rows": sum(t["rows"] for shard in manifest["shards"].values() for t in shard["texts"]),
                "bytes": plan.nbytes,
                "left_out": manifest["left_out"],
                "verified": manifest["verified"],
            },
            indent=2,
        )
    )
    if dropped:
        raise SystemExit(f"{len(dropped)} texts gave rows that are not finite, and were left out")


if __name__ == "__main__":
    main()
