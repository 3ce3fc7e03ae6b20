"""When blocks are long."""

import dataclasses

import jax.numpy as jnp
import pytest

from qwen38_jax.block_length import first_block, next_block, step_reason
from qwen38_jax.spec_config import SpecConfig

SPEC = SpecConfig(verify_tokens=15, lookup=True)


def decisions(reasons, spec=SPEC, drafts=7, tokens=1000):
    """For each sequence what is decided at the end of each step; `reasons` has a string of 0 and 1 a sequence."""
    state = first_block(len(reasons), spec, drafts)
    rows = []
    for step in zip(*reasons, strict=True):
        reason = jnp.array([r == "1" for r in step])
        state = next_block(state, reason, jnp.full(len(reasons), tokens), spec, drafts)
        rows.append(state.long.tolist())
    return ["".join("SL"[long] for long in row) for row in zip(*rows, strict=True)]


def test_two_reasons_late_by_a_step_and_three_blocks_more():
    assert decisions(["11100000"]) == ["SSLLLLLS"]


def test_neighbours_decide_for_themselves():
    assert decisions(["11100000", "00000000", "10101010", "11111111"]) == [
        "SSLLLLLS",
        "SSSSSSSS",
        "SSSSSSSS",
        "SSLLLLLL",
    ]


@pytest.mark.parametrize(
    ("changes", "drafts", "expected"),
    [
        ({"sticky": 0}, 7, "SSLLSSSS"),
        ({"adaptive": False}, 7, "LLLLLLLL"),
        ({"cheap_context": 1001}, 7, "LLLLLLLL"),
        ({"cheap_context": 1000}, 7, "SSLLLLLS"),
        ({}, 15, "LLLLLLLL"),
        ({}, 0, "LLLLLLLL"),
    ],
)
def test_settings(changes, drafts, expected):
    assert decisions(["11100000"], dataclasses.replace(SPEC, **changes), drafts) == [expected]


@pytest.mark.parametrize(
    ("changes", "short", "long"),
    [({}, 8, 8), ({"saturation": 5}, 5, 8), ({"long_saturation": 12}, 8, 12)],
)
def test_saturation(changes, short, long):
    spec = dataclasses.replace(SPEC, **changes)
    emitted = jnp.arange(17)
    for is_long, least in ((False, short), (True, long)):
        reason = step_reason(jnp.ones(17, bool), emitted, jnp.full(17, is_long), spec, 7)
        assert reason.tolist() == (emitted >= least).tolist()
    assert not step_reason(jnp.zeros(17, bool), emitted, emitted > 0, spec, 7).any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verify_tokens": 32}, "at most 31"),
        ({"verify_tokens": -1}, "verify_tokens"),
        ({"nmin": 0}, "nmin"),
        ({"nmax": 3.0}, "nmax"),
        ({"adaptive": 1}, "adaptive"),
    ],
)
def test_bad_settings_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SPEC, **changes)
