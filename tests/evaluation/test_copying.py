"""Edit distance against a slow oracle."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen38_jax.evaluation.copying import edit_distance, first_difference

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def oracle(a, b):
    """The textbook recursion, cell by cell."""
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            change = table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
            table[i, j] = min(change, table[i - 1, j] + 1, table[i, j - 1] + 1)
    return table[len(a), len(b)]


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_equals_the_oracle(a, b):
    assert edit_distance(a, b) == edit_distance(b, a) == oracle(a, b)


@settings(deadline=None)
@given(TOKENS, st.integers(0, 12), st.integers(0, 3))
def test_an_inserted_token_is_one_wrong_token(tokens, at, new):
    assert edit_distance([*tokens[:at], new, *tokens[at:]], tokens) == 1


def test_six_thousand_tokens_take_no_minute():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 8000, 6000)
    b = np.delete(rng.permutation(a), [17, 4000])
    b[0], b[-1] = a[0] + 1, a[-1] + 1  # no equal ends to take off
    began = time.perf_counter()
    assert 2 <= edit_distance(a, b) <= 6000
    assert time.perf_counter() - began < 20


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_first_difference(a, b):
    at = first_difference(a, b)
    assert (at is None) == (a == b)
    if at is not None:
        assert a[:at] == b[:at] and a[at : at + 1] != b[at : at + 1]
