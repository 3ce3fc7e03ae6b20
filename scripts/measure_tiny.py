"""Measures a small checkpoint on held-out documents: copying, renaming, Python, MTP acceptance, perplexity.

    python -m scripts.measure_tiny                                the checkpoint that ships, a few minutes on a GPU
    python -m scripts.measure_tiny --quick                        a few trials of each, for a CPU
    python -m scripts.measure_tiny --checkpoint DIR --run DIR     another one

Everything is greedy and goes through the project's engine. Prints the figures beside their targets and appends a record
to experiments/results/tiny_checkpoint.jsonl, from which scripts/make_card.py writes the checkpoint's card.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.harness import RESULTS, append, new_record
from qwen38_jax.checkpoint.files import weights_hash
from qwen38_jax.config import KERNELS
from qwen38_jax.engine import Engine
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.evaluation import measures
from qwen38_jax.evaluation.acceptance import Text
from qwen38_jax.evaluation.answers import answer_all
from qwen38_jax.evaluation.exam import QUICK, Exam, Trials, draw_exam, jobs
from qwen38_jax.evaluation.figures import figures_table, tasks_table
from qwen38_jax.evaluation.held_out import documents_hash, documents_of
from qwen38_jax.evaluation.ngram import NGram, train_ngram
from qwen38_jax.training.bpe import END_OF_TEXT
from qwen38_jax.training.corpus import Document, load_corpus
from qwen38_jax.training.dataset import LineEncoder, load_tokenizer

QUESTION = "tiny_checkpoint"
NGRAM_ORDER = 5
SCORE_BATCH = 8  # texts read at once, whole: their logits are [8, T, V] fp32
TRAINING_RUN = RESULTS / "train_tiny"


def held_out_by(run: Path) -> set[str] | None:
    """The groups of documents that a training run held out, from its data.json; None if it does not say."""
    path = run / "data.json"
    groups = json.loads(path.read_text()).get("held_out") if path.exists() else None
    return None if groups is None else set(groups)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A checkpoint, and the documents that it was trained on and not trained on.

    `split` says whose word it is that it was not: "the training run's" or "this Python's".
    """

    checkpoint: Path
    engine: Engine
    train: Sequence[Document]
    held_out: Sequence[Document]
    split: str

    @classmethod
    def load(cls, checkpoint: Path, run: Path, stdlib: Path | None, **options: Any) -> "Subject":
        """`options` are those of `Engine.from_checkpoint`; the other arguments are the script's."""
        engine = Engine.from_checkpoint(checkpoint, **options)
        corpus, groups = load_corpus(root=stdlib), held_out_by(run)
        split = "this Python's" if groups is None else "the training run's"
        return cls(checkpoint, engine, corpus.train, documents_of(corpus.held_out, groups), split)


def train_baseline(subject: Subject) -> NGram:
    """The n-gram model of the training documents, in the checkpoint's own tokens."""
    backend = load_tokenizer(subject.checkpoint)
    texts = LineEncoder(backend)([d.text + END_OF_TEXT for d in subject.train])
    return train_ngram(np.concatenate(texts), backend.get_vocab_size(), NGRAM_ORDER)


def judge(engine: Engine, exam: Exam, answers: dict[str, list[Text]], batch: int) -> dict[str, Any]:
    """All figures but those that the n-gram model and whole documents are needed for."""
    copied = {
        name: measures.copies(engine.tokenizer, asked, answers[name])
        for name, asked in exam.questions.items()
        if name != "rename"
    }
    return {
        **copied,
        "rename": measures.renames(engine.tokenizer, exam.questions["rename"], answers["rename"]),
        "mtp_acceptance": {k: measures.acceptance(engine, answers[k], batch) for k in ("chat", "prose", "code")},
        "tasks": measures.task_scores(engine, exam.tasks, batch),
    }


def perplexities(engine: Engine, documents: Sequence[Document], trials: Trials) -> dict[str, Any]:
    return {
        kind: measures.perplexity(
            engine, [d for d in documents if d.kind == kind], trials.scored_documents, trials.scored_tokens
        )
        for kind in ("prose", "code")
    }


class Reporter:
    """Says on stderr what is being done, with the time since the start and the device's memory."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self, text: str) -> None:
        stats = jax.local_devices()[0].memory_stats() or {}
        memory = f", peak {stats['peak_bytes_in_use'] / 2**30:.1f} GiB" if "peak_bytes_in_use" in stats else ""
        print(f"[{self.seconds:4.0f} s{memory}] {text}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began


def write_failures(path: Path, engine: Engine, exam: Exam, answers: dict[str, list[Text]]) -> None:
    """One JSON line a wrong answer: where it first went wrong."""
    with path.open("w", encoding="utf-8") as file:
        for name, asked in exam.questions.items():
            for failure in measures.failures(engine.tokenizer, asked, answers[name]):
                file.write(json.dumps({"figure": name, **failure}, ensure_ascii=False) + "\n")


def measure(subject: Subject, trials: Trials, batch: int, seed: int, failures: Path | None = None) -> dict[str, Any]:
    """Measures everything; the record. `failures` is where wrong answers are shown."""
    say, engine = Reporter(), subject.engine
    exam = draw_exam(subject.held_out, load_tokenizer(subject.checkpoint), trials, seed)
    asked = jobs(exam, engine.tokenizer, trials)
    flat = iter(answer_all(engine, [job for of in asked.values() for job in of], batch, say))
    answers = {name: [next(flat) for _ in of] for name, of in asked.items()}
    if failures:
        write_failures(failures, engine, exam, answers)
    results = judge(engine, exam, answers, min(batch, SCORE_BATCH))
    say("judged the answers, read the tasks")
    results["perplexity"] = perplexities(engine, subject.held_out, trials)
    say("scored the documents")
    results["continuation"] = measures.python_bodies(
        engine.tokenizer, exam.functions, answers["code"], train_baseline(subject), trials.function_tokens
    )
    say("compared with the n-gram model")
    settings = {
        "checkpoint": subject.checkpoint.name,
        "weights_sha256": weights_hash(subject.checkpoint),
        "dtype": engine.cfg.dtype,
        "kernels": engine.cfg.kernels,
        "quick": trials != Trials(),
        "batch": batch,
        "seed": seed,
        "trials": dataclasses.asdict(trials),
        "held_out_documents": len(subject.held_out),
        "held_out_sha256": documents_hash(subject.held_out),
        "split": subject.split,
    }
    return new_record(
        QUESTION,
        weights="trained",
        settings=settings,
        results={**results, "seconds": say.seconds},
        prompts=[[name, [job.prompt for job in of]] for name, of in asked.items()],
        repeats=1,
    )


def main(argv: Sequence[str] | None = None) -> None:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", default=SHIPPED_CHECKPOINT, help="default: the one that ships")
    add("--run", type=Path, metavar="DIR", help="of its training, where data.json says what was held out")
    add("--stdlib", type=Path, metavar="DIR", help="library directory of another Python installation")
    add("--quick", action="store_true", help="few trials: whether it works, not how well")
    add("--batch", type=int, default=4 if on_cpu else 128, metavar="N", help="answers at once (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else the checkpoint's own")
    add("--kernels", choices=KERNELS, default="auto", help="as for generate (%(default)s)")
    add("--failures", type=Path, metavar="FILE", help="show there where wrong answers go wrong, as JSON lines")
    add("--seed", type=int, default=0, metavar="N", help="of the questions (%(default)s)")
    args = parser.parse_args(argv)
    if args.run is None:
        if args.checkpoint != SHIPPED_CHECKPOINT:
            parser.error("--checkpoint needs --run: what its training held out is what it may be measured on")
        args.run = TRAINING_RUN
    options = {"dtype": args.dtype, "kernels": args.kernels, "max_batch": args.batch}
    subject = Subject.load(args.checkpoint, args.run, args.stdlib, **options)
    print(f"{len(subject.held_out)} held-out documents by {subject.split} split", file=sys.stderr, flush=True)
    record = measure(subject, QUICK if args.quick else Trials(), args.batch, args.seed, args.failures)
    append(record)
    print(figures_table(record["results"]), tasks_table(record["results"]), sep="\n\n")
    if args.quick:
        print("\nA quick run: the figures are of few trials.")


if __name__ == "__main__":
    main()
