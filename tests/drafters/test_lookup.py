"""Suffix lookup and its fusion with a drafter, against Triton kernels' results and a plain reference."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from qwen38_jax.drafters.interface import LOOKUP_HEAD, LOOKUP_TAIL, MTP, Proposal
from qwen38_jax.drafters.lookup import Match, fuse, resize, suffix_match
from qwen38_jax.spec_config import SpecConfig
from tests.golden import GOLDEN, needs_golden

CAPACITY = 512


@functools.partial(jax.jit, static_argnames=("k", "nmin", "nmax", "search"))
def matched(history, last, distance, k, nmin, nmax, search):
    return suffix_match(history, last, distance, k, nmin=nmin, nmax=nmax, search=search)


def look_up(sequence, k, nmin, nmax, search=2**30, distance=0):
    """(tokens, length, valid) for one sequence, in memory whose rest holds what would match."""
    history = np.resize(np.asarray(sequence, np.int32), CAPACITY)[None]
    match = matched(history, np.array([len(sequence) - 1]), np.array([distance]), k, nmin, nmax, search)
    valid = int(match.valid[0])
    return np.asarray(match.tokens[0, :valid]).tolist(), int(match.length[0]), valid


def reference(sequence, k, nmin, nmax, search=2**30, distance=0):
    """The rule in words: the longest match, capped, then the one at the last distance, then the most recent."""
    n, best = len(sequence), (0, False, -1)
    if n < nmin + 2:
        return [], 0, 0
    for end in range(max(nmin - 1, n - search), n - 1):
        m = 0
        while m < nmax and end - m >= 0 and sequence[end - m] == sequence[n - 1 - m]:
            m += 1
        if m >= nmin:
            best = max(best, (m, n - 1 - end == distance, end))
    length, _, end = best
    tokens = sequence[end + 1 : end + 1 + k] if length else []
    return tokens, length, len(tokens)


@needs_golden
def test_golden_lookups():
    with safe_open(GOLDEN / "golden_lookup.safetensors", "np") as file:
        cases = sorted({key.split("/")[1] for key in file.keys() if key.startswith("lookup/")})
        assert len(cases) == len(json.loads(file.metadata()["lookup_index"])) == 44
        for case in cases:
            sequence, sizes, tokens, (length, valid) = (
                file.get_tensor(f"lookup/{case}/{name}") for name in ("seq", "k_nmin_nmax", "tokens", "matchlen_valid")
            )
            found = look_up(sequence, *sizes.tolist())
            assert found == (tokens[:valid].tolist(), length, valid), case


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_text_of_few_tokens(data):
    vocab = data.draw(st.sampled_from([1, 2, 3, 6]))
    sequence = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=60))
    sizes = data.draw(st.sampled_from([(7, 2, 4), (15, 6, 12)]))
    search = data.draw(st.sampled_from([9, 2**30]))
    distance = data.draw(st.integers(0, 60))
    assert look_up(sequence, *sizes, search, distance) == reference(sequence, *sizes, search, distance)


def test_a_copy_keeps_its_distance():
    """The text's end was there before, twice; the later one went on otherwise, but is not what is being copied."""
    sequence = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3]
    assert look_up(sequence, 2, 3, 3)[0] == [5, 9]
    assert look_up(sequence, 2, 3, 3, distance=10)[0] == [4, 9]
    # A longer match is taken wherever it is.
    assert look_up([7, *sequence[1:], 7, 2, 3], 2, 2, 3, distance=8)[0] == [4, 9]
    history, last = np.array([[*sequence, 0, 0, 0]]), np.array([12])
    found = [int(matched(history, last, np.array([d]), 2, 3, 3, 2**30).distance[0]) for d in (0, 10)]
    none = int(matched(history, np.array([4]), np.array([3]), 2, 3, 3, 2**30).distance[0])
    assert (found, none) == ([5, 10], 3)


def test_more_history_than_numbers_is_refused():
    with pytest.raises(ValueError, match="lower nmax"):
        jax.eval_shape(
            lambda h: suffix_match(h, jnp.zeros(1, int), jnp.zeros(1, int), 1, nmin=1, nmax=2**12, search=1),
            jax.ShapeDtypeStruct((1, 2**20), jnp.int32),
        )


def proposal_of(tokens) -> Proposal:
    tokens = jnp.asarray(tokens, jnp.int32)
    ones = jnp.ones(tokens.shape, bool)
    log_q = jnp.zeros((*tokens.shape, 1))
    return Proposal(tokens, tokens[..., None], log_q, ~ones, ones, jnp.full_like(tokens, MTP))


@needs_golden
def test_golden_fusion_table():
    """All 1212 rows; those that share settings at once."""
    with safe_open(GOLDEN / "golden_lookup.safetensors", "np") as file:
        table = file.get_tensor("fuse/table")
    assert len(table) == 1212
    for key in np.unique(table[:, :7], axis=0):
        k, drafts, nmin, nstrong, agree, nmin_tail, longmin = key.tolist()
        rows = table[(table[:, :7] == key).all(axis=1)]
        length, valid, has_tail = rows[:, 7], rows[:, 9], rows[:, 10]
        drafted, looked_up, out, used = (rows[:, at : at + k] for at in (12, 27, 42, 57))
        sizes = dict(nmin=nmin, nmax=32, nstrong=nstrong, agree=agree, nmin_tail=nmin_tail, longmin=longmin)
        spec = SpecConfig(verify_tokens=k, lookup=True, **sizes)
        match = Match(jnp.asarray(looked_up), jnp.asarray(length), jnp.asarray(valid), jnp.zeros(len(length), int))
        fused, tail = fuse(proposal_of(drafted[:, :drafts]), match, spec)
        np.testing.assert_array_equal(tail, has_tail.astype(bool))
        index = np.arange(k)
        own = index < drafts
        # What neither provides is put up for verification there; here it is no draft. All looked-up ids are distinct.
        expected = own | ((index < valid[:, None]) & (out == looked_up))
        np.testing.assert_array_equal(fused.valid, expected)
        np.testing.assert_array_equal(np.where(expected, fused.tokens, 0), np.where(expected, out, 0))
        # A token taken because it agrees with the draft keeps that draft's distribution; the table makes it certain.
        kept = (index < agree) & (length < nstrong)[:, None] & own
        certain = np.where(kept, False, used.astype(bool))
        np.testing.assert_array_equal(np.where(expected, fused.point_mass, False), certain & expected)


def test_sources_and_sizes():
    match = Match(jnp.array([[1, 2, 3, 4]]), jnp.array([6]), jnp.array([3]), jnp.array([1]))
    fused, _ = fuse(proposal_of([[1, 9]]), match, SpecConfig(verify_tokens=4, lookup=True))
    assert fused.tokens[0, :3].tolist() == [1, 2, 3]
    assert fused.valid.tolist() == [[True, True, True, False]]
    assert fused.source[0, :3].tolist() == [LOOKUP_HEAD, LOOKUP_HEAD, LOOKUP_TAIL]
    assert resize(fused, 1).tokens.tolist() == [[1]]


def test_no_match_leaves_the_drafts():
    match = Match(jnp.array([[1, 2, 3, 4]]), jnp.array([0]), jnp.array([0]), jnp.array([0]))
    fused, tail = fuse(proposal_of([[8, 9]]), match, SpecConfig(verify_tokens=4, lookup=True))
    assert fused.tokens[0, :2].tolist() == [8, 9] and not fused.point_mass.any() and not tail.any()
    assert fused.valid.tolist() == [[True, True, False, False]]
