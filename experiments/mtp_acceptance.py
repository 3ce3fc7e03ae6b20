"""Does the MTP head accept in serving what a simulation of its chains says offline?

    python -m experiments.mtp_acceptance --prompts 24 --tokens 128

Greedy answers are drafted by the compiled step, with its caches. Offline, the chains from every position of the same
answers are worked out at once, and a walk over them counts what each step would have accepted. Position by position the
two may differ by 3 points at most, else the exit code is 1.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.equality import requests
from experiments.harness import WEIGHTS, append, new_record, table
from qwen38_jax.config import ModelConfig
from qwen38_jax.drafters.modes import MTP_TOKENS, make_drafter
from qwen38_jax.engine import Engine
from qwen38_jax.model import logits
from qwen38_jax.params import Params
from qwen38_jax.state import capacity_for
from qwen38_jax.training.forward import mtp_chain, sequence_forward

QUESTION = "mtp_acceptance"
POINTS = 3.0
COLUMNS = ("draft_tokens", "serving_percent", "offline_percent", "largest_difference_points", "tokens_per_step")


@functools.partial(jax.jit, static_argnames=("cfg", "depth", "real_vocab_size"))
def chained_tokens(params: Params, cfg: ModelConfig, tokens: jax.Array, depth: int, real_vocab_size: int) -> jax.Array:
    """`[depth, T]`: what a chain that was right so far drafts for token t + 1 + d (from 1) of the text `tokens [T]`."""
    hidden = sequence_forward(params, cfg, tokens[None])
    rows = mtp_chain(params, cfg, tokens[None], hidden, depth)[:, 0]
    return jnp.argmax(logits(params, rows)[..., :real_vocab_size], axis=-1)


def walk(drafts: np.ndarray, text: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray, int]:
    """What steps along a text would draft and accept.

    Args:
      drafts: `[depth, T]` as `chained_tokens` gives them. text: `[n]` token ids, the prompt and the answer.
      first: index of the answer's first token, which takes no step.

    Returns:
      Drafted and accepted, each `[depth]`, by position in the block; steps.
    """
    depth = len(drafts)
    drafted, accepted, steps, anchor = np.zeros(depth, int), np.zeros(depth, int), 0, first
    while anchor < len(text) - 1:
        room = min(depth, len(text) - 2 - anchor)  # the last token needs no draft
        right = [drafts[d, anchor - 1] == text[anchor + 1 + d] for d in range(room)]
        n = next((d for d, is_right in enumerate(right) if not is_right), room)
        drafted[:room] += 1
        accepted[:n] += 1
        steps += 1
        anchor += n + 1
    return drafted, accepted, steps


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the one that ships")
    parser.add_argument("--weights", choices=WEIGHTS, help="what the checkpoint holds; needed with --checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
    parser.add_argument("--draft-tokens", type=int, default=MTP_TOKENS, metavar="K", help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of every answer (%(default)s)")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.weights is None):
        parser.error("--checkpoint and --weights go together: the checkpoint that ships is trained")
    plain = Engine.from_checkpoint(args.checkpoint, dtype=args.dtype)
    speculation = make_drafter("mtp", plain.params, draft_tokens=args.draft_tokens)
    engine = Engine(plain.params, plain.cfg, plain.tokenizer, speculation=speculation)
    asked = requests(args.prompts, args.tokens)
    prompts = [engine.encode(request) for request in asked]
    serving, offline = np.zeros((2, args.draft_tokens), int), np.zeros((2, args.draft_tokens), int)
    steps = 0
    for prompt, answer in zip(prompts, engine.generate(asked), strict=True):
        serving += np.array([answer.speculation.by_position.drafted, answer.speculation.by_position.accepted])
        text = np.array([*prompt, *answer.token_ids])
        padded = jnp.asarray(np.pad(text, (0, capacity_for(len(text)) - len(text))))
        drafts = chained_tokens(engine.params, engine.cfg, padded, args.draft_tokens, engine.tokenizer.vocab_size)
        *counts, own_steps = walk(np.asarray(drafts), text, len(prompt))
        offline += counts
        steps += own_steps
    percent = [100 * accepted / np.maximum(drafted, 1) for drafted, accepted in (serving, offline)]
    difference = float(np.abs(percent[0] - percent[1]).max())
    record = new_record(
        QUESTION,
        weights=args.weights or "trained",
        settings={
            "checkpoint": args.checkpoint.name if args.checkpoint else "tiny",
            "dtype": engine.cfg.dtype,
            "draft_tokens": args.draft_tokens,
        },
        results={
            "serving_percent": percent[0].round(2).tolist(),
            "offline_percent": percent[1].round(2).tolist(),
            "largest_difference_points": difference,
            "drafted": serving[0].tolist(),
            "offline_steps": steps,
        },
        tokens_per_step=args.prompts * (args.tokens - 1) / (args.prompts * (args.tokens - 1) - int(serving[1].sum())),
        prompts=prompts,
        output_tokens=args.tokens,
        thinking=False,
    )
    append(record)
    print(table([record], COLUMNS))
    return 1 if difference > POINTS else 0


if __name__ == "__main__":
    sys.exit(main())
