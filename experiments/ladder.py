"""Tokens and milliseconds a step of every way of drafting, when the answer reproduces a document of the prompt.

    python -m experiments.ladder
    python -m experiments.ladder --drafter DIR --drafter-weights trained

Every rung answers the same prompt greedily; beside what it measures, the record says whether its tokens are those of
plain decoding, and how many of its drafts that plain answer accepts, teacher-forced.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness import WEIGHTS, Timing, append, new_record, table
from qwen38_jax.checkpoint import load_drafter
from qwen38_jax.drafters.modes import make_drafter
from qwen38_jax.engine import Completion, Engine, Request
from qwen38_jax.evaluation.forced import forced_acceptance
from qwen38_jax.evaluation.held_out import REPRODUCE
from qwen38_jax.sampling_params import SamplingParams

QUESTION = "ladder"
# mode, draft tokens, verify tokens; None is the mode's own default.
RUNGS = (("none", None, None), ("lookup", None, 15), ("mtp", 4, None), ("mtp+lookup", 4, 15))
DFLASH2_RUNGS = (("dflash2", None, None), ("dflash2+lookup", None, 15))
COLUMNS = (
    "speculate",
    "tokens_per_second=tok/s",
    "tokens_per_step=tokens/step",
    "ms_per_step=ms/step",
    "forced_tokens_per_step=tokens/step, forced",
    "same_tokens=same tokens",
    "long_block_share=long blocks",
)
# Of fixed wording, and nothing that the checkpoint that ships was trained on.
DOCUMENT = Path(__file__).resolve().parents[1] / "LICENSE"


def run(engine: Engine, request: Request, repeats: int) -> tuple[Completion, Timing]:
    """The answer and the seconds of a step, without those of compiling."""
    completions = [engine.generate([request])[0] for _ in range(1 + repeats)][1:]
    return completions[0], Timing(tuple(c.decode_seconds / c.steps for c in completions))


def drafter_of(engine: Engine, rung: tuple, dflash2: tuple | None):
    """What an engine of this mode speculates with. rung: (mode, draft tokens, verify tokens)."""
    mode, draft_tokens, verify_tokens = rung
    return make_drafter(
        mode,
        engine.params,
        draft_tokens=draft_tokens,
        verify_tokens=verify_tokens,
        dflash2=dflash2 if "dflash2" in mode else None,
    )


def rung_record(
    engine: Engine,
    rung: tuple,
    dflash2: tuple | None,
    request: Request,
    plain: Completion | None,
    settings: dict[str, Any],
    repeats: int,
) -> tuple[dict[str, Any], Completion]:
    """The record of one rung; `plain` is plain decoding's answer, None for plain decoding itself."""
    mode, draft_tokens, verify_tokens = rung
    speculation = drafter_of(engine, rung, dflash2)
    rung_engine = Engine(engine.params, engine.cfg, engine.tokenizer, speculation=speculation)
    completion, step = run(rung_engine, request, repeats)
    new_tokens = len(completion.token_ids) - 1
    results: dict[str, Any] = {"tokens_per_second": new_tokens / (step.median * completion.steps)}
    if plain is not None:
        counts = forced_acceptance(engine.params, engine.cfg, *speculation, request.prompt_ids, plain.token_ids)
        results |= {
            "same_tokens": completion.token_ids == plain.token_ids,
            "forced_tokens_per_step": (len(plain.token_ids) - 1) / int(counts.steps[0]),
            "long_block_share": completion.speculation.long_block_share,
            "speculation": dataclasses.asdict(completion.speculation),
        }
    record = new_record(
        QUESTION,
        weights=settings["weights"],
        settings={"speculate": mode, "draft_tokens": draft_tokens, "verify_tokens": verify_tokens, **settings["own"]},
        results=results,
        tokens_per_step=new_tokens / completion.steps,
        seconds_per_step=step,
        prompts=[request.prompt_ids],
        output_tokens=len(completion.token_ids),
        thinking=False,
    )
    return record, completion


def document_request(engine: Engine, text: str, tokens: int) -> Request:
    """Asks for the first lines of a text, of about so many tokens, to be repeated."""
    lines = text.splitlines(keepends=True)
    kept: list[str] = []
    for line in lines:
        if len(engine.tokenizer.encode("".join((*kept, line)), parse_special=False)) > tokens:
            break
        kept.append(line)
    if not kept:
        raise ValueError(f"the first line of the document has more than {tokens} tokens")
    messages = [{"role": "user", "content": f"{REPRODUCE}\n\n" + "".join(kept)}]
    sampling = SamplingParams(temperature=0.0, seed=0, max_new_tokens=tokens + 16)
    ids = engine.encode(Request(messages=messages, thinking=False))
    return Request(prompt_ids=ids, sampling=sampling)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: the one that ships")
    parser.add_argument("--weights", choices=WEIGHTS, help="what the checkpoint holds; needed with --checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
    parser.add_argument("--document", type=Path, metavar="FILE", default=DOCUMENT, help="UTF-8 text (the license)")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="of the document (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of every rung (%(default)s)")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter, for two rungs more")
    parser.add_argument("--drafter-weights", choices=WEIGHTS, help="what it holds; needed with --drafter")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.weights is None):
        parser.error("--checkpoint and --weights go together: the checkpoint that ships is trained")
    if (args.drafter is None) != (args.drafter_weights is None):
        parser.error("--drafter and --drafter-weights go together")
    if args.tokens < 2 or args.repeats < 1:
        parser.error("--tokens must be at least 2, --repeats at least 1")
    engine = Engine.from_checkpoint(args.checkpoint, dtype=args.dtype)
    dflash2 = None if args.drafter is None else load_drafter(args.drafter, dtype=engine.cfg.dtype)
    request = document_request(engine, args.document.read_text(encoding="utf-8"), args.tokens)
    settings = {
        "weights": args.weights or "trained",
        "own": {
            "checkpoint": args.checkpoint.name if args.checkpoint else "tiny",
            "drafter": args.drafter.name if args.drafter else None,
            "drafter_weights": args.drafter_weights,
            "dtype": engine.cfg.dtype,
            "document": args.document.name,
            "prompt_tokens": len(request.prompt_ids),
        },
    }
    records, plain = [], None
    for rung in (*RUNGS, *(DFLASH2_RUNGS if dflash2 else ())):
        record, completion = rung_record(engine, rung, dflash2, request, plain, settings, args.repeats)
        plain = plain or completion
        append(record)
        records.append(record)
    print(table(records, COLUMNS))


if __name__ == "__main__":
    main()
