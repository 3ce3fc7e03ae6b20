"""Judging answers, without a model."""

import numpy as np
import pytest

from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.evaluation.acceptance import Text
from qwen38_jax.evaluation.exam import expected_ids
from qwen38_jax.evaluation.held_out import FunctionStart, Question
from qwen38_jax.evaluation.measures import copies, failures, python_bodies, renames
from qwen38_jax.evaluation.ngram import train_ngram
from qwen38_jax.tokenizer import Tokenizer
from qwen38_jax.training.bpe import END_OF_TEXT


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(SHIPPED_CHECKPOINT)


def test_copies(tokenizer):
    text = "a = 1\nb = 2"
    right = expected_ids(tokenizer, text)
    questions = [Question("", text, "code")] * 2 + [Question("", text, "prose", whole=False)] * 2
    answers = [right, (5, *right), right[:-1], (*right[:-1], 7, 7)]  # the last two have not stopped
    figures = copies(tokenizer, questions, [Text((1,), a) for a in answers])
    assert figures["wrong_tokens"] == [0, 1, 1, 2]
    assert (figures["exact"], figures["median_wrong_tokens"], figures["trials"]) == (0.25, 1.0, 4)
    assert (figures["kinds"], figures["whole_documents"]) == ({"code": 2, "prose": 2}, 2)
    assert copies(tokenizer, [], []) is None is renames(tokenizer, [], [])


def test_renames_count_old_names_that_are_left(tokenizer):
    questions = [Question("", "new + older", "code", old="old", new="new")] * 2
    answers = [Text((1,), expected_ids(tokenizer, text)) for text in ("new + older", "old + older")]
    figures = renames(tokenizer, questions, answers)
    assert (figures["exact"], figures["old_name_left"]) == (0.5, 0.5)


def test_failures_show_the_first_difference(tokenizer):
    questions = [Question("", "x = new + 1", "code", old="old", new="new")] * 2
    answers = [Text((1,), expected_ids(tokenizer, text)) for text in ("x = new + 1", "x = old + 1")]
    [failure] = failures(tokenizer, questions, answers)
    assert (failure["before"], failure["token"]) == ("x =", 2)
    assert failure["expected"] == " new + 1<|im_end|>" and failure["answered"] == " old + 1<|im_end|>"


def test_python_bodies(tokenizer):
    def ids(text):
        return tuple(tokenizer.encode(text, parse_special=True))

    # The n-gram model has seen nothing but this, and says it again.
    corpus = np.array(ids(f"def f(x):\n    return x +\n{END_OF_TEXT}"))
    ngram = train_ngram(corpus, tokenizer.vocab_size, 3)
    function = FunctionStart("def f(x):\n", "def f(x):\n")
    answers = [
        Text(ids(function.prompt), ids(text)) for text in ("    return x\n\n\ndef", f"    return (x{END_OF_TEXT}")
    ]
    shares = python_bodies(tokenizer, [function] * 2, answers, ngram, new_tokens=20)
    assert (shares["model"], shares["ngram_greedy"], shares["points_ahead"]) == (0.5, 0.0, 50.0)
