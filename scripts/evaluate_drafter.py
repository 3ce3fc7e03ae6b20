"""Judges an MTP head or a DFlash2 drafter on held-out outputs: offline from captured states, and in decoding.

    python -m scripts.evaluate_drafter held_out/ --checkpoint DIR --verify-tokens 4 7
    python -m scripts.evaluate_drafter held_out/ --checkpoint DIR --mtp runs/mtp/mtp.safetensors
    python -m scripts.evaluate_drafter held_out/ --checkpoint DIR --drafter runs/dflash2/drafter --online 50

Offline: what would be drafted behind every token of the outputs; how often the likeliest candidate is right and how
often the token is a candidate, by place; drafts accepted in a chain, and by the best choice among candidates; tokens a
step of a decode along the outputs, which should be those of greedy decoding. `--online N` decodes the first N prompts
greedily and compares: where tokens a step differ by more than 5 %, it says so and the exit code is 1. Records go to
experiments/results/drafters.jsonl.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.harness import append, new_record, table
from qwen38_jax.checkpoint import load_checkpoint, load_drafter
from qwen38_jax.checkpoint.draft_ids import read_vocabulary
from qwen38_jax.checkpoint.files import weights_hash
from qwen38_jax.checkpoint.mtp_file import read_mtp
from qwen38_jax.config import KERNELS
from qwen38_jax.drafters.modes import cut_draft_head, make_drafter
from qwen38_jax.engine import Engine, Request
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab.capture import Captured
from qwen38_jax.lab.judging import dflash2_drafts, judge, mtp_drafts
from qwen38_jax.lab.runs import open_states
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.tokenizer import Tokenizer

QUESTION = "drafters"
COLUMNS = (
    "drafter",
    "where",
    "verify_tokens=drafts verified",
    "source",
    "tokens_per_step=tokens a step",
    "first=first draft",
    "last=last draft",
    "outputs",
)
TOLERANCE = 0.05  # between offline and online tokens per step, relative


class Subject:
    """What is judged: a model with one drafter, which `args` names."""

    def __init__(self, args: argparse.Namespace):
        directory = args.checkpoint or SHIPPED_CHECKPOINT
        self.identity = weights_hash(directory)
        checkpoint = load_checkpoint(directory, dtype=args.dtype)
        self.params, self.cfg = checkpoint.params, dataclasses.replace(checkpoint.cfg, kernels=args.kernels)
        self.tokenizer = Tokenizer.from_directory(directory)
        self.dflash2 = None if args.drafter is None else load_drafter(args.drafter, dtype=self.cfg.dtype)
        self.head = checkpoint.draft_head if args.draft_vocab is None else None
        if args.mtp is not None:
            self.params = self.params.replace(mtp=read_mtp(args.mtp, self.cfg))
        if self.dflash2 is None and self.params.mtp is None:
            raise ValueError(f"{directory} has no MTP head, and no drafter was given: name one with --drafter or --mtp")
        if args.draft_vocab is not None:
            ids = read_vocabulary(args.draft_vocab, self.cfg.vocab_size)
            self.head = cut_draft_head(self.params, ids, vocab_size=self.tokenizer.vocab_size)

    @property
    def mode(self) -> str:
        return "mtp" if self.dflash2 is None else "dflash2"

    def offline(self, captured: Captured, verify_tokens: list[int]) -> dict[str, Any]:
        size = self.tokenizer.vocab_size
        if self.dflash2 is None:
            drafter = mtp_drafts(self.params, self.cfg, max(verify_tokens), head=self.head, real_vocab_size=size)
        else:
            drafter = dflash2_drafts(*self.dflash2, self.params, real_vocab_size=size)
        with tqdm(total=len(captured.texts), unit="output") as progress:
            return judge(drafter, captured, verify_tokens, progress.update)

    def online(self, captured: Captured, count: int, verify_tokens: int, batch: int) -> dict[str, Any]:
        """Greedy decoding of the captured prompts, each as long as its captured output."""
        drafts = verify_tokens if self.dflash2 is None else None
        speculation = make_drafter(
            self.mode,
            self.params,
            draft_head=self.head,
            draft_tokens=drafts,
            verify_tokens=verify_tokens,
            dflash2=self.dflash2,
        )
        engine = Engine(self.params, self.cfg, self.tokenizer, max_batch=batch, speculation=speculation)
        requests = [
            Request(
                prompt_ids=captured.rows(text, "tokens", 0, text.prompt).tolist(),
                sampling=SamplingParams(temperature=0.0, seed=0, max_new_tokens=text.rows - text.prompt),
            )
            for text in captured.texts[:count]
        ]
        done = [c.speculation for c in engine.generate(requests)]
        accepted = np.sum([s.by_position.accepted for s in done], axis=0)
        steps = sum(s.steps for s in done)
        return {
            "tokens_per_step": sum(s.emitted for s in done) / max(steps, 1),
            "accepted": (accepted / max(steps, 1)).tolist(),
            "outputs": len(done),
        }


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """The records, and where offline and online figures disagree."""
    subject = Subject(args)
    captured = open_states(args.states, subject.identity)
    name = args.name or (subject.mode if args.drafter is None else f"dflash2 {args.drafter.name}")
    shared = {"drafter": name, "checkpoint": subject.identity[:12], "dtype": subject.cfg.dtype}
    prompts = [captured.rows(t, "tokens", 0, t.prompt).tolist() for t in captured.texts]
    records, disagreements = [], []

    def record(where: str, source: str, k: int, found: dict[str, Any], outputs: int, **more: Any) -> None:
        settings = {**shared, "where": where, "source": source, "verify_tokens": k}
        accepted = found["accepted"]
        results = {"accepted": accepted, "first": accepted[0], "last": accepted[-1], "outputs": outputs, **more}
        about = {"tokens_per_step": found["tokens_per_step"], "prompts": prompts}
        records.append(new_record(QUESTION, weights="trained", settings=settings, results=results, **about))

    figures = subject.offline(captured, args.verify_tokens)
    for source, found in figures.items():
        about = {key: found[key] for key in ("tokens", "right", "among", "chain", "oracle")}
        for k, of_k in found["verify"].items():
            record("offline", source, k, of_k, found["outputs"], **about)
    if args.online:
        offline = subject.offline(captured.first(args.online), args.verify_tokens)["all"]["verify"]
        for k in args.verify_tokens:
            found = subject.online(captured, args.online, k, args.batch)
            record("online", "all", k, found, found.pop("outputs"))
            expected = offline[k]["tokens_per_step"]
            if abs(found["tokens_per_step"] / expected - 1) > TOLERANCE:
                disagreements.append(
                    f"{k} drafts: {expected:.2f} tokens a step offline, {found['tokens_per_step']:.2f} online"
                )
    return records, disagreements


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("states", type=Path, metavar="STATES", help="captured states of held-out outputs")
    add("--checkpoint", type=Path, metavar="DIR", help="the model (default: the one that ships)")
    add("--mtp", type=Path, metavar="FILE", help="an MTP head in place of the checkpoint's, as train_mtp writes it")
    add("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter, to be judged instead of MTP")
    add("--draft-vocab", type=Path, metavar="FILE", help="ids that MTP may draft, JSON or .pt")
    add("--verify-tokens", type=int, nargs="+", default=[4, 7], metavar="K", help="drafts of a step (default: 4 7)")
    add("--online", type=int, default=0, metavar="N", help="decode the first N prompts as well")
    add("--batch", type=int, default=4 if jax.default_backend() == "cpu" else 64, metavar="N", help="decoded at once")
    add("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's own")
    add("--kernels", choices=KERNELS, default="auto", help="whether decoding uses the kernels (%(default)s)")
    add("--name", help="of the drafter, in the record")
    args = parser.parse_args(argv)
    try:
        records, disagreements = run(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    for one in records:
        append(one)
    print(table(records, COLUMNS))
    if disagreements:
        raise SystemExit("offline and online figures disagree:\n" + "\n".join(disagreements))


if __name__ == "__main__":
    main(sys.argv[1:])
