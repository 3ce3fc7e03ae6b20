"""Answers prompts with the model and keeps the outputs as token ids: what drafters are counted and trained on.

    python -m scripts.generate_outputs prompts.jsonl outputs.jsonl --checkpoint DIR --temperature 0

A prompt is a JSON line with prompt, messages or prompt_ids and, if wanted, thinking, source (a tag) and max_new_tokens.
The same command again goes on where an earlier one was stopped or killed. Prints the figures of the file as JSON.
qwen38_jax/lab/README.md describes the format.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from qwen38_jax.checkpoint.files import weights_hash
from qwen38_jax.config import KERNELS
from qwen38_jax.engine import Engine
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab.generation import generate_outputs, read_prompts

_SAMPLING = ("temperature", "top_k", "top_p", "max_new_tokens")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", type=Path, metavar="PROMPTS.jsonl")
    add("outputs", type=Path, metavar="OUTPUTS.jsonl", help="new, or begun by the same command")
    add("--checkpoint", type=Path, metavar="DIR", default=SHIPPED_CHECKPOINT, help="default: the one that ships")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else the checkpoint's own")
    add("--kernels", choices=KERNELS, default="auto", help="whether to use the kernels (%(default)s)")
    add("--batch", type=int, default=8 if jax.default_backend() == "cpu" else 256, help="answers at once (%(default)s)")
    add("--temperature", type=float, help="sampling settings: default those of the checkpoint")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--max-new-tokens", type=int, help="of a prompt that does not say itself")
    add("--seed", type=int, default=0, help="of the first prompt; each has the next one (%(default)s)")
    args = parser.parse_args(argv)
    try:
        prompts = read_prompts(args.prompts)
        engine = Engine.from_checkpoint(args.checkpoint, dtype=args.dtype, kernels=args.kernels, max_batch=args.batch)
        given = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
        with tqdm(total=len(prompts), unit="prompt") as progress:
            figures = generate_outputs(
                engine,
                prompts,
                args.outputs,
                sampling=engine.sampling(seed=args.seed, **given),
                checkpoint=weights_hash(args.checkpoint),
                batch=args.batch,
                advance=progress.update,
            )
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on from here") from None
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
