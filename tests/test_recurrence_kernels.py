"""The model computes the same whether its recurrence runs through kernels or through jnp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.block import Block, chain_block
from qwen38_jax.drafters.modes import make_drafter
from qwen38_jax.engine import Engine, Request
from qwen38_jax.model import forward
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.state import StateConfig, accept, accept_path, flush
from tests.kernels.implementations import COMPILE_QUICKLY
from tests.models import SMALL, assert_same_state, poisoned_state, prompt, small_params

PLAIN = dataclasses.replace(SMALL, linear_key_head_dim=16, linear_value_head_dim=16, kernels="off")
KERNELS = dataclasses.replace(PLAIN, kernels="interpret")
PARAMS = small_params(PLAIN)
ROWS, ATOL = 6, 1e-4
run = jax.jit(forward, static_argnames=("cfg", "commit"), compiler_options=COMPILE_QUICKLY)
ACCEPT, ACCEPT_PATH, FLUSH = jax.jit(accept), jax.jit(accept_path), jax.jit(flush)
CHAIN = jnp.broadcast_to(jnp.arange(ROWS) - 1, (2, ROWS))
#  0 - 1 - 2 - 5
#   \    \- 4
#    3
TREE = jnp.array([[-1, 0, 1, 0, 1, 2]] * 2)
DEPTHS = jnp.array([0, 1, 2, 1, 2, 3])


def commit(cfg, state, seed, lengths, rows=ROWS):
    tokens, valid = prompt(rows, batch=2, seed=seed), jnp.arange(rows) < jnp.array(lengths)[:, None]
    return run(PARAMS, cfg, chain_block(tokens, state.lengths, valid), state, commit=True)


def verify(cfg, state, seed, parents, depths, valid=True):
    tokens, valid = prompt(ROWS, batch=2, seed=seed), jnp.broadcast_to(valid, (2, ROWS))
    block = Block(tokens, state.lengths[:, None] + depths, valid, parents)
    return run(PARAMS, cfg, block, state, commit=False)


def assert_same(ours, theirs, rows=slice(None)):
    np.testing.assert_allclose(ours[0][:, rows], theirs[0][:, rows], atol=ATOL, rtol=ATOL)
    assert_same_state(FLUSH(ours[2]), FLUSH(theirs[2]), atol=ATOL)


@pytest.fixture(scope="module")
def base():
    """Two sequences, of 6 and of 2 tokens."""
    return commit(PLAIN, poisoned_state(PLAIN, StateConfig(batch=2, capacity=128, rows=8, page=8)), 0, [6, 2])[2]


@pytest.fixture(scope="module")
def pending(base):
    """A chain of six rows of which the second sequence has four, not yet accepted; by kernels, and by jnp."""
    valid = jnp.arange(ROWS) < jnp.array([[6], [4]])
    ours, theirs = (verify(cfg, base, 1, CHAIN, jnp.arange(ROWS), valid) for cfg in (KERNELS, PLAIN))
    np.testing.assert_allclose(ours[0][valid], theirs[0][valid], atol=ATOL, rtol=ATOL)
    return ours[2], theirs[2]


@pytest.mark.parametrize("n", range(ROWS + 1))
def test_any_number_of_accepted_rows(pending, n):
    ours, theirs = (ACCEPT(state, jnp.array([n, ROWS - n])) for state in pending)
    assert_same_state(FLUSH(ours), FLUSH(theirs), atol=ATOL)
    # The next block's kernel writes them, before a tree and before rows that are committed.
    assert_same(verify(KERNELS, ours, 2, TREE, DEPTHS), verify(PLAIN, theirs, 2, TREE, DEPTHS))
    ours, theirs = commit(KERNELS, ours, 3, [6, 1]), commit(PLAIN, theirs, 3, [6, 1])
    assert_same(ours, theirs, slice(1))
    assert_same_state(ours[2], theirs[2], atol=ATOL)


@pytest.mark.parametrize("path", [[0], [0, 3], [0, 1, 4], [0, 1, 2, 5], []])
def test_any_path_of_a_tree(base, path):
    keep = jnp.broadcast_to(jnp.isin(jnp.arange(8), jnp.array(path, jnp.int32)), (2, 8))
    states = [ACCEPT_PATH(verify(cfg, base, 4, TREE, DEPTHS)[2], keep) for cfg in (KERNELS, PLAIN)]
    assert_same_state(*map(FLUSH, states), atol=ATOL)
    assert_same(*(commit(cfg, state, 5, [2, 2]) for cfg, state in zip((KERNELS, PLAIN), states, strict=True)), slice(2))


def test_a_prompt_after_accepted_rows(pending):
    """More rows than a verify block has, in two chunks, of two lengths."""
    states = [ACCEPT(state, jnp.array([3, 1])) for state in pending]
    ours, theirs = (commit(cfg, s, 6, [70, 9], 70) for cfg, s in zip((KERNELS, PLAIN), states, strict=True))
    valid = jnp.arange(70) < jnp.array([[70], [9]])
    np.testing.assert_allclose(ours[0][valid], theirs[0][valid], atol=ATOL, rtol=ATOL)
    assert_same_state(ours[2], theirs[2], atol=ATOL)


@pytest.mark.slow
def test_the_shipped_model_says_the_same():
    """A copy in verify blocks of looked-up drafts, by kernels, is what plain decoding without them says."""
    request = Request(
        messages=[{"role": "user", "content": "Repeat the string below exactly.\n\nqX7-blue_harbor/42"}],
        sampling=SamplingParams(temperature=0, max_new_tokens=24),
        thinking=False,
    )
    engine = Engine.from_checkpoint(dtype="float32")
    cfg, drafter = dataclasses.replace(engine.cfg, kernels="interpret"), make_drafter("lookup", engine.params)
    interpreted = Engine(engine.params, cfg, engine.tokenizer, speculation=drafter)
    ours, theirs = (e.generate([request])[0].token_ids for e in (interpreted, engine))
    assert len(ours) > 8 and ours == theirs
