"""The n-gram model against probabilities computed from plain counts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen38_jax.evaluation.ngram import DISCOUNT, train_ngram

V = 5
TEXT = st.lists(st.integers(0, V - 1), min_size=4, max_size=40)


def oracle(text, order, context):
    """Interpolated absolute discounting, straight from its definition."""
    p = np.full(V, 1 / V)
    for n in range(min(order, len(context) + 1)):
        suffix = tuple(context[len(context) - n :])
        counts = Counter(text[i + n] for i in range(len(text) - n) if tuple(text[i : i + n]) == suffix)
        if not counts:
            break
        total = sum(counts.values())
        p = np.array([max(counts[w] - DISCOUNT, 0) / total + DISCOUNT * len(counts) / total * p[w] for w in range(V)])
    return p


@settings(max_examples=60, deadline=None)
@given(TEXT, st.lists(st.integers(0, V - 1), max_size=6), st.integers(1, 4))
def test_equals_the_definition(text, context, order):
    model = train_ngram(np.array(text, np.uint16), V, order)
    p = model.probabilities(context)
    np.testing.assert_allclose(p, oracle(text, order, context), atol=1e-12)
    assert p.sum() == pytest.approx(1)


def test_greedy_recites_and_stops():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 4, 0]
    model = train_ngram(np.array(text), V, 3)
    assert model.generate([1, 2], 8, stop_id=0) == [4, 1, 2, 4, 1, 2, 4, 1]
    assert train_ngram(np.array([1, 2, 3, 0]), V, 3).generate([1], 8, stop_id=0) == [2, 3, 0]


def test_samples_follow_the_distribution():
    model = train_ngram(np.array([1, 2, 1, 3, 1, 2, 1, 2, 4, 0]), V, 2)
    rng = np.random.default_rng(0)
    drawn = Counter(model.generate([1], 1, 0, rng)[0] for _ in range(4000))
    np.testing.assert_allclose([drawn[w] / 4000 for w in range(V)], model.probabilities([1]), atol=0.03)


def test_context_longer_than_ever_met_backs_off():
    model = train_ngram(np.array([1, 2, 3, 4, 1, 2, 3, 4]), V, 3)
    np.testing.assert_array_equal(model.probabilities([4, 4, 2]), model.probabilities([0, 2]))


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="order 5"):
        train_ngram(np.array([1, 2]), V, 5)
