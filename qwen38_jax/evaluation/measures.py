"""Figures of a small checkpoint, from its answers and from what it makes of given texts."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qwen38_jax.engine import Engine
from qwen38_jax.evaluation.acceptance import Text, choices, repeats
from qwen38_jax.evaluation.answers import compare
from qwen38_jax.evaluation.copying import first_difference
from qwen38_jax.evaluation.exam import expected_ids
from qwen38_jax.evaluation.held_out import FunctionStart, Question
from qwen38_jax.evaluation.ngram import NGram
from qwen38_jax.evaluation.python_source import body_parses
from qwen38_jax.tokenizer import Tokenizer
from qwen38_jax.training.bpe import END_OF_TEXT
from qwen38_jax.training.corpus import Document
from qwen38_jax.training.dataset import HeldOutTask


def copies(tokenizer: Tokenizer, questions: Sequence[Question], answers: Sequence[Text]) -> dict[str, Any] | None:
    """How far answers are from the right ones, as `answers.compare`; None without any question."""
    if not questions:
        return None
    return {
        **compare(answers, [expected_ids(tokenizer, q.expected) for q in questions]),
        "kinds": dict(Counter(q.kind for q in questions)),
        "whole_documents": sum(q.whole for q in questions),
    }


def failures(
    tokenizer: Tokenizer, questions: Sequence[Question], answers: Sequence[Text], context: int = 24
) -> list[dict[str, Any]]:
    """Where each wrong answer first goes wrong: `context` right tokens before, and as many of both from there on."""
    wrong = []
    for question, answer in zip(questions, answers, strict=True):
        expected = expected_ids(tokenizer, question.expected)
        at = first_difference(answer.answer, expected)
        if at is not None:
            before, right, said = expected[max(0, at - context) : at], expected[at:], answer.answer[at:]
            texts = {"before": before, "expected": right[:context], "answered": said[:context]}
            shown = {name: tokenizer.decode(ids, skip_special=False) for name, ids in texts.items()}
            wrong.append({"token": at, "of": len(expected), "old": question.old, "new": question.new, **shown})
    return wrong


def renames(tokenizer: Tokenizer, questions: Sequence[Question], answers: Sequence[Text]) -> dict[str, Any] | None:
    """As `copies`, and the share of answers in which the old name still stands somewhere."""
    figures = copies(tokenizer, questions, answers)
    if figures is None:
        return None
    left = [
        bool(re.search(rf"\b{q.old}\b", tokenizer.decode(a.answer))) for q, a in zip(questions, answers, strict=True)
    ]
    return {**figures, "old_name_left": float(np.mean(left))}


def python_bodies(
    tokenizer: Tokenizer, functions: Sequence[FunctionStart], answers: Sequence[Text], ngram: NGram, new_tokens: int
) -> dict[str, Any]:
    """Share of generated function bodies that parse (see `python_source`): of the model, and of the n-gram model.

    The latter continues the same prompts, greedily and sampled; the model is compared with the better of the two.
    """
    stop = tokenizer.token_to_id(END_OF_TEXT)

    def share(continuations: Iterable[Sequence[int]]) -> float:
        return float(np.mean([_parses(tokenizer, f, ids) for f, ids in zip(functions, continuations, strict=True)]))

    rng = np.random.default_rng(0)
    shares = {
        "model": share(a.answer for a in answers),
        "ngram_greedy": share(ngram.generate(a.prompt, new_tokens, stop) for a in answers),
        "ngram_sampled": share(ngram.generate(a.prompt, new_tokens, stop, rng) for a in answers),
    }
    ahead = shares["model"] - max(shares["ngram_greedy"], shares["ngram_sampled"])
    return {"trials": len(answers), **shares, "points_ahead": 100 * ahead, "ngram_order": ngram.order}


def _parses(tokenizer: Tokenizer, function: FunctionStart, continuation: Sequence[int]) -> bool:
    ended = continuation[-1] in tokenizer.special_ids
    return body_parses(function.header, tokenizer.decode(continuation), ended)


def acceptance(engine: Engine, answers: Sequence[Text], batch: int) -> dict[str, Any] | None:
    """How often the MTP head's first draft is the token that the model then chose, along its own greedy answers.

    "new": the same where an answer does not repeat itself (see `repeats`). None without a head.
    """
    if engine.params.mtp is None:
        return None
    found = choices(engine.params, engine.cfg, answers, real_vocab_size=engine.tokenizer.vocab_size, batch=batch)
    accepted = np.concatenate([c.head for c in found])
    new = ~np.concatenate([repeats(a.answer)[1:] for a in answers])
    return {**_share(accepted), "new": _share(accepted[new])}


def _share(accepted: np.ndarray) -> dict[str, Any]:
    return {"accepted": float(accepted.mean()), "positions": len(accepted)}


def perplexity(engine: Engine, documents: Iterable[Document], count: int, longest: int) -> dict[str, Any]:
    """Perplexity a token and bits a byte of plain text: the first `longest` tokens of `count` documents."""
    loss = tokens = size = 0
    scored = list(documents)[:count]
    for document in scored:
        ids = engine.tokenizer.encode(document.text, parse_special=False)[:longest]
        loss -= sum(engine.score(ids).logprobs)
        tokens += len(ids) - 1
        size += sum(len(engine.tokenizer.token_bytes(i)) for i in ids[1:])
    return {
        "perplexity": float(np.exp(loss / tokens)),
        "bits_per_byte": float(loss / np.log(2) / size),
        "tokens": tokens,
        "bytes": size,
        "trials": len(scored),
    }


def task_scores(engine: Engine, tasks: Sequence[HeldOutTask], batch: int) -> dict[str, dict[str, Any]]:
    """By family: share of the answer's tokens that are right given those before, and of answers with all right.

    The latter equals the share of greedy answers that are exactly the expected one. Without thinking.
    """
    texts = [
        Text(
            tuple(engine.tokenizer.encode_chat(t.messages, enable_thinking=False)),
            expected_ids(engine.tokenizer, t.expected),
        )
        for t in tasks
    ]
    found = choices(engine.params, engine.cfg, texts, real_vocab_size=engine.tokenizer.vocab_size, batch=batch)
    by_family = defaultdict(list)
    for task, choice in zip(tasks, found, strict=True):
        by_family[task.task].append(choice.trunk)
    return {
        family: {
            "accuracy": float(np.concatenate(right).mean()),
            "exact": float(np.mean([r.all() for r in right])),
            "trials": len(right),
        }
        for family, right in by_family.items()
    }
