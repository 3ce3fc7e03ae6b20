"""Candidates, scores and the walk, by hand and by chi-square."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.drafters.selector import Lattice, make_lattice, walk
from qwen38_jax.params import CandidateSelector
from qwen38_jax.sampling_params import SamplingParams
from tests.drafters.dflash2_golden import sampler_of

IDS = np.array([[1, 2], [3, 4], [4, 5]])
# By predecessor, then candidate. After the anchor, 2 wins against the likelier 1; after 2, 4; then there is a tie.
SCORES = np.array([[[1.0, 1.5], [1.0, 1.5]], [[2.0, 1.0], [2.0, 2.5]], [[1.0, 1.0], [1.0, 1.0]]], np.float32)


def test_scores_by_hand():
    """Three rows of two candidates, codes of rank 1. The padding, ids 6 and 7, is what the head likes best."""
    unary = np.full((1, 3, 8), -10.0, np.float32)
    unary[..., 6:], unary[0, 0, 5], unary[0, 0, 4] = 100.0, np.nan, np.inf
    unary[0, 0, [1, 2]] = 1.0, 0.5
    unary[0, 1, [3, 4]] = 2.0, 1.0
    unary[0, 2, [4, 5]] = 1.0, 1.0  # of equal ones the lower id comes first
    predecessors, successors = np.zeros((2, 8, 1), np.float32)
    predecessors[[0, 2, 4], 0] = 1, 3, 5  # 0 is the anchor
    successors[[2, 4], 0] = 1
    selector = CandidateSelector(jnp.ones((1, 2)), jnp.asarray(predecessors), jnp.asarray(successors))
    hidden = jnp.asarray([[[1.0, 0.0], [0.5, 0.0], [0.0, 0.0]]])  # the rows' codes are 1, 0.5 and 0
    lattice = make_lattice(selector, hidden, jnp.asarray(unary), jnp.array([0]), count=2, real_vocab_size=6)
    np.testing.assert_array_equal(lattice.ids[0], IDS)
    np.testing.assert_allclose(lattice.scores[0], SCORES)


N = 20_000


@pytest.fixture(scope="module")
def walks():
    """One greedy walk and N sampled ones over the scores above, at another seed each."""
    one = sampler_of(SamplingParams(temperature=0.7, top_k=1, seed=0), vocab=8)
    sampler = jax.tree.map(lambda t: jnp.broadcast_to(t, (N + 1, *t.shape[1:])), one)
    seeds = jnp.stack([jnp.zeros(N + 1, jnp.uint32), jnp.arange(N + 1, dtype=jnp.uint32)], axis=1)
    sampler = sampler.replace(key_data=seeds, temperature=sampler.temperature.at[0].set(0))
    lattice = Lattice(*(jnp.broadcast_to(t, (N + 1, *t.shape)) for t in (IDS, SCORES)))
    positions = jnp.broadcast_to(jnp.arange(3), (N + 1, 3))
    return jax.tree.map(np.asarray, jax.jit(walk, static_argnums=3)(lattice, sampler, positions, False))


def test_a_greedy_walk_follows_what_it_chose(walks):
    chosen, log_q = walks
    np.testing.assert_array_equal(chosen[0], [1, 1, 0])
    np.testing.assert_array_equal(log_q[0], [[-np.inf, 0], [-np.inf, 0], [0, -np.inf]])


def test_sampled_walks_have_the_distribution_that_is_reported(walks):
    """Joint frequencies, chi-square at p = 1e-4. Top-k is not asked for, so both candidates are drawn."""
    chosen, log_q = (t[1:] for t in walks)
    q = np.exp(SCORES.astype(np.float64) / 0.7)
    q /= q.sum(axis=-1, keepdims=True)
    before = np.pad(chosen[:, :-1], ((0, 0), (1, 0)))
    np.testing.assert_allclose(np.exp(log_q), q[np.arange(3), before], atol=1e-6)
    expected = N * (q[0, 0][:, None, None] * q[1][:, :, None] * q[2][None])
    seen = np.zeros_like(expected)
    np.add.at(seen, tuple(chosen.T), 1)
    assert expected.min() > 5
    assert ((seen - expected) ** 2 / expected).sum() < 29.9  # 7 degrees of freedom
