"""Writes a checkpoint of random weights with the names, shapes, dtypes and files of a published Qwen3.8-27B.

    python scripts/make_synthetic_checkpoint.py --like qwen3.8-27b-w4a16 /tmp/w4a16 --scale small

`w4a16` is compressed-tensors, symmetric, in groups of 128; `fast` the same with an int4 head, an int8 embedding, an
int4 MTP head and a draft head; `gptq` and `gptq-act-order` (columns in order of importance) GPTQ; `fp8` blocks of
128 x 128. `dflash2` and `dflash2-w4a16` are drafters.

For speed and memory measurements at full size, and for tests scaled down. Logits are finite and activations keep
their size through the layers, but the text such a model writes means nothing.
"""

import argparse
from pathlib import Path

from qwen38_jax.checkpoint.load import read_config
from qwen38_jax.checkpoint.synthetic import LIKE, SCALES, recipe, write


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", metavar="DST", help="a new or empty directory")
    parser.add_argument("--like", choices=LIKE, required=True, help="tiny: text only, small, fp32")
    parser.add_argument(
        "--scale", choices=SCALES, help="default: full (55.6 GB in bf16, 19.5 GB in W4A16), tiny is small"
    )
    parser.add_argument("--layers", type=int, help="text layers, a multiple of 4; of a drafter any number")
    parser.add_argument("--vocab", type=int, help="rows of the embedding and of the head")
    parser.add_argument("--target", type=Path, metavar="DIR", help="a checkpoint that the drafter is to fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-vision", action="store_true", help="leave the vision tower out (default: written)")
    parser.add_argument("--tokenizer", metavar="DIR", help="copy tokenizer and chat template from here")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one a core); changes no value")
    args = parser.parse_args(argv)
    if args.workers is not None and args.workers < 1:
        parser.error("--workers must be at least 1")
    try:
        target = None if args.target is None else read_config(args.target)[2]
        chosen = recipe(
            args.like,
            scale=args.scale,
            layers=args.layers,
            vocab=args.vocab,
            vision=not args.no_vision,
            target=target,
        )
        write(args.destination, chosen, seed=args.seed, tokenizer=args.tokenizer, workers=args.workers)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
