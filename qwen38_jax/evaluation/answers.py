"""Greedy answers to many prompts of different lengths, and how far they are from the expected ones."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen38_jax.engine import Engine, Request
from qwen38_jax.evaluation.acceptance import Text
from qwen38_jax.evaluation.copying import edit_distance
from qwen38_jax.sampling_params import SamplingParams


class Job(NamedTuple):
    """A prompt, as token ids, and how many tokens its answer may have."""

    prompt: tuple[int, ...]
    max_new_tokens: int


def answer_all(engine: Engine, jobs: Sequence[Job], batch: int, say: Callable[[str], None]) -> list[Text]:
    """Answers in the order of the jobs. `batch` of about the same length run together, whatever they are for.

    `say` is told about every batch: how long it took.
    """
    order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].prompt) - jobs[i].max_new_tokens)
    answers: dict[int, Text] = {}
    for first in range(0, len(jobs), batch):
        rows = order[first : first + batch]
        began = time.perf_counter()
        completions = engine.generate([_request(jobs[i]) for i in rows])
        answers |= {i: Text(jobs[i].prompt, c.token_ids) for i, c in zip(rows, completions, strict=True)}
        lengths = [len(c.token_ids) for c in completions]
        seconds, compiling = time.perf_counter() - began, completions[0].compile_seconds
        say(
            f"{first + len(rows)} of {len(jobs)} answers: prompts of up to {max(len(jobs[i].prompt) for i in rows)}, "
            f"answers of up to {max(lengths)} tokens in {seconds:.0f} s ({compiling:.0f} s of it compiling)"
        )
    return [answers[i] for i in range(len(jobs))]


def _request(job: Job) -> Request:
    sampling = SamplingParams(temperature=0.0, seed=0, max_new_tokens=job.max_new_tokens)
    return Request(prompt_ids=job.prompt, sampling=sampling)


def compare(answers: Sequence[Text], expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Wrong tokens of every answer, which is the edit distance between its ids and the expected ones.

    Both with the stop id, so that an answer that goes on for ever, or was cut, is wrong.
    """
    wrong = [edit_distance(a.answer, e) for a, e in zip(answers, expected, strict=True)]
    return {
        "trials": len(wrong),
        "exact": float(np.mean([n == 0 for n in wrong])),
        "median_wrong_tokens": float(np.median(wrong)),
        "wrong_tokens": wrong,
        "expected_tokens": [len(e) for e in expected],
    }
