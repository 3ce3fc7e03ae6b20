"""Does every way of drafting say what plain decoding says?

    python -m experiments.equality --prompts 50 --tokens 300

Greedy answers of each mode, token by token against plain decoding's. Where the two part at a near-tie, that is if plain
decoding found the two tokens about equally likely, the rest of that answer is not compared: rows in another number are
summed in another order. Any other difference is a fault, and the exit code 1.
"""

import argparse
import itertools
import pydoc_data.topics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness import WEIGHTS, append, new_record, table
from experiments.ladder import drafter_of
from qwen38_jax.checkpoint import load_drafter
from qwen38_jax.engine import Completion, Engine, Request
from qwen38_jax.evaluation.held_out import REPRODUCE
from qwen38_jax.sampling_params import SamplingParams

QUESTION = "equality"
# mode, draft tokens, verify tokens; None is the mode's own default.
RUNGS = (
    *(("mtp", k, None) for k in (1, 2, 3, 4, 7, 15, 31)),
    *(("lookup", None, k) for k in (1, 2, 3, 4, 7, 15, 31)),
    ("mtp+lookup", 3, 7),
    ("mtp+lookup", 4, 15),
    ("mtp+lookup", 7, 31),
)
DFLASH2_RUNGS = (
    ("dflash2", None, 3),
    ("dflash2", None, None),
    ("dflash2+lookup", None, 15),
    ("dflash2+lookup", None, 31),
)
# Log-probabilities closer than this are a near-tie.
TIES = {"float32": 1e-3, "bfloat16": 0.06}
COLUMNS = (
    "speculate",
    "draft_tokens=drafts",
    "verify_tokens=verified",
    "equal",
    "near_ties=near-ties",
    "faults",
    "tokens_per_step=tokens/step",
    "largest_logprob_difference=max |dlogprob|",
)


class Comparison(NamedTuple):
    """One answer against plain decoding's.

    compared: tokens, up to the first that differs. near_tie: whether they part where two tokens are about equally
    likely; fault: whether anywhere else. logprob_difference: the largest of a token that was compared.
    """

    compared: int
    near_tie: bool
    fault: bool
    logprob_difference: float


def compare(plain: Completion, other: Completion, tie: float) -> Comparison:
    """Both with log-probabilities and some alternatives to each token."""
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    shorter = min(len(plain.token_ids), len(other.token_ids))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    ended = same == len(plain.token_ids) == len(other.token_ids)
    near_tie = False
    if same < shorter:
        said = plain.logprobs[same]
        near_tie = dict(said.top).get(other.token_ids[same], -float("inf")) > said.logprob - tie
    differences = (abs(a.logprob - b.logprob) for a, b in zip(plain.logprobs[:same], other.logprobs, strict=False))
    return Comparison(same, near_tie, not (ended or near_tie), max(differences, default=0.0))


def requests(count: int, tokens: int) -> list[Request]:
    """Prompts about Python's own documentation: to be repeated, to be explained, and to be continued as plain text.

    Answers do not end before so many tokens.
    """
    sampling = SamplingParams(temperature=0.0, seed=0, max_new_tokens=tokens, ignore_eos=True, logprobs=2)
    asks = itertools.cycle((REPRODUCE, "Explain the text below.", None))
    texts = itertools.cycle(sorted(pydoc_data.topics.topics.items()))
    result = []
    for (_, text), ask in itertools.islice(zip(texts, asks, strict=False), count):
        head = text.strip()[:600]
        if ask is None:
            result.append(Request(prompt=head, sampling=sampling))
        else:
            messages = [{"role": "user", "content": f"{ask}\n\n{head}"}]
            result.append(Request(messages=messages, sampling=sampling, thinking=False))
    return result


def rung_record(
    engine: Engine, rung: tuple, dflash2, asked: list[Request], plain: list[Completion], settings: dict[str, Any]
) -> dict[str, Any]:
    """The record of one mode."""
    mode, draft_tokens, verify_tokens = rung
    speculation = drafter_of(engine, rung, dflash2)
    other = Engine(engine.params, engine.cfg, engine.tokenizer, speculation=speculation, max_batch=settings["batch"])
    answers = other.generate(asked)
    found = [compare(a, b, TIES[engine.cfg.dtype]) for a, b in zip(plain, answers, strict=True)]
    return new_record(
        QUESTION,
        weights=settings["weights"],
        settings={
            "speculate": mode,
            "draft_tokens": answers[0].speculation.draft_tokens,
            "verify_tokens": answers[0].speculation.verify_tokens,
            **{name: value for name, value in settings.items() if name != "weights"},
        },
        results={
            "sequences": len(found),
            "equal": sum(not (c.near_tie or c.fault) for c in found),
            "near_ties": sum(c.near_tie for c in found),
            "faults": sum(c.fault for c in found),
            "compared_tokens": sum(c.compared for c in found),
            "largest_logprob_difference": max(c.logprob_difference for c in found),
        },
        tokens_per_step=sum(len(a.token_ids) - 1 for a in answers) / sum(a.steps for a in answers),
        prompts=[engine.encode(request) for request in asked],
        output_tokens=asked[0].sampling.max_new_tokens,
        thinking=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the one that ships")
    parser.add_argument("--weights", choices=WEIGHTS, help="what the checkpoint holds; needed with --checkpoint")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter, for its modes as well")
    parser.add_argument("--dtype", choices=tuple(TIES), help="default: float32 on a CPU, else the checkpoint's")
    parser.add_argument("--prompts", type=int, default=50, metavar="N", help="%(default)s")
    parser.add_argument("--tokens", type=int, default=300, metavar="N", help="of every answer (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="answered together (%(default)s)")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="only these (default: all)")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.weights is None):
        parser.error("--checkpoint and --weights go together: the checkpoint that ships is trained")
    if args.prompts < 1 or args.tokens < 2:
        parser.error("--prompts must be at least 1, --tokens at least 2")
    engine = Engine.from_checkpoint(args.checkpoint, dtype=args.dtype, max_batch=args.batch)
    dflash2 = None if args.drafter is None else load_drafter(args.drafter, dtype=engine.cfg.dtype)
    rungs = [*RUNGS, *(DFLASH2_RUNGS if dflash2 else ())]
    rungs = [rung for rung in rungs if args.modes is None or rung[0] in args.modes]
    if not rungs:
        parser.error(f"--modes {' '.join(args.modes)}: none of these can be run; DFlash2's need --drafter")
    asked = requests(args.prompts, args.tokens)
    plain = engine.generate(asked)
    settings = {
        "weights": args.weights or "trained",
        "checkpoint": args.checkpoint.name if args.checkpoint else "tiny",
        "drafter": args.drafter.name if args.drafter else None,
        "dtype": engine.cfg.dtype,
        "batch": args.batch,
        "near_tie_below": TIES[engine.cfg.dtype],
    }
    records = []
    for rung in rungs:
        records.append(rung_record(engine, rung, dflash2, asked, plain, settings))
        append(records[-1])
    print(table(records, COLUMNS))
    return 1 if any(record["results"]["faults"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
