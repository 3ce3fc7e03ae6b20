"""What a small checkpoint is asked, from held-out documents; every prompt as token ids."""

import dataclasses
import random
from collections.abc import Sequence

import tokenizers

from qwen38_jax.evaluation.answers import Job
from qwen38_jax.evaluation.held_out import (
    FunctionStart,
    Question,
    draw_documents,
    function_starts,
    plain_starts,
    renamings,
    reproductions,
    string_copies,
)
from qwen38_jax.tokenizer import Tokenizer
from qwen38_jax.training.bpe import END_OF_TURN
from qwen38_jax.training.corpus import Corpus, Document
from qwen38_jax.training.dataset import HeldOutTask, LineEncoder, held_out_tasks
from qwen38_jax.training.excerpts import make_library

SPARE_TOKENS = 64  # that an answer may have beyond the expected one
PROSE_PROMPT_TOKENS = 256
SHORTEST_TASK = 128  # tokens of prompt and answer


@dataclasses.dataclass(frozen=True)
class Trials:
    """How many trials each figure has, and how long they are, in tokens."""

    reproduce_2k: int = 20
    reproduce_6k: int = 20
    rename: int = 40
    copy_256: int = 50
    functions: int = 100
    function_tokens: int = 256  # generated below each header
    module_tokens: int = 1000  # above it, at most
    prose: int = 20
    prose_tokens: int = 192
    chats_per_task: int = 8
    chat_tokens: int = 256
    tasks_per_family: int = 20
    task_tokens: int = 2048  # prompt and answer, at most
    scored_documents: int = 100  # of each kind, at most
    scored_tokens: int = 4096  # of each, from its beginning


QUICK = Trials(
    reproduce_2k=1,
    reproduce_6k=0,
    rename=2,
    copy_256=4,
    functions=12,
    function_tokens=128,
    module_tokens=350,
    prose=4,
    prose_tokens=96,
    chats_per_task=1,
    chat_tokens=96,
    tasks_per_family=2,
    task_tokens=400,
    scored_documents=4,
    scored_tokens=512,
)


@dataclasses.dataclass(frozen=True)
class Exam:
    """All that is asked. `questions` have one right answer; the rest is continued or answered freely."""

    questions: dict[str, list[Question]]  # reproduce_2k, reproduce_6k, rename, copy_256
    functions: list[FunctionStart]
    prose: list[str]
    chats: list[HeldOutTask]
    tasks: list[HeldOutTask]  # read, not answered


def draw_exam(held_out: Sequence[Document], backend: tokenizers.Tokenizer, trials: Trials, seed: int) -> Exam:
    """Draws every question. `backend` is the checkpoint's tokenizer.json.

    Raises ValueError when the documents have no prose or no code.
    """
    encode, library = LineEncoder(backend), make_library(held_out, backend)

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed}/{name}")

    def documents(name: str, count: int, low: int, high: int) -> list[Question]:
        return reproductions(draw_documents(held_out, encode, count, low, high, rng(name)))

    def tasks(per_task: int, longest: int, seed: int) -> list[HeldOutTask]:
        corpus, lengths = Corpus((), tuple(held_out)), (SHORTEST_TASK, longest)
        return held_out_tasks(corpus, backend, per_task=per_task, total_tokens=lengths, seed=seed)

    return Exam(
        questions={
            "reproduce_2k": documents("reproduce_2k", trials.reproduce_2k, 1900, 2100),
            "reproduce_6k": documents("reproduce_6k", trials.reproduce_6k, 5800, 6200),
            "rename": renamings(held_out, library, trials.rename, rng("rename")),
            "copy_256": string_copies(library, backend, trials.copy_256, 256, rng("copy")),
        },
        functions=function_starts(held_out, encode, trials.functions, trials.module_tokens, rng("functions")),
        prose=plain_starts(held_out, encode, "prose", PROSE_PROMPT_TOKENS)[: trials.prose],
        chats=tasks(trials.chats_per_task, trials.task_tokens // 2, seed),
        tasks=tasks(trials.tasks_per_family, trials.task_tokens, seed + 1),
    )


def jobs(exam: Exam, tokenizer: Tokenizer, trials: Trials) -> dict[str, list[Job]]:
    """Prompts and longest answers by figure. Chats think where they were drawn so; questions with an answer do not."""

    def plain(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, parse_special=False))

    named = {
        name: [Job(_ask(tokenizer, q.message), len(expected_ids(tokenizer, q.expected)) + SPARE_TOKENS) for q in asked]
        for name, asked in exam.questions.items()
    }
    named["code"] = [Job(plain(f.prompt), trials.function_tokens) for f in exam.functions]
    named["prose"] = [Job(plain(text), trials.prose_tokens) for text in exam.prose]
    named["chat"] = [
        Job(tuple(tokenizer.encode_chat(c.messages, enable_thinking=c.thinking)), trials.chat_tokens)
        for c in exam.chats
    ]
    return named


def expected_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A right answer with the token that ends it."""
    return (*tokenizer.encode(text, parse_special=False), tokenizer.token_to_id(END_OF_TURN))


def _ask(tokenizer: Tokenizer, message: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_chat([{"role": "user", "content": message}], enable_thinking=False))
