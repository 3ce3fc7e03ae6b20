"""Whether sampled texts have the distribution that they should have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from qwen38_jax.sampling import sampler_state

V, SAMPLES, LENGTH = 16, 20_000, 3  # vocabulary, texts, and the tokens of each that are looked at


def batch_of(request, n):
    """`n` requests that differ in nothing but their keys."""
    one = sampler_state([dataclasses.replace(request, seed=0)], [[]], vocab_size=V, real_vocab_size=V, eos_ids=())
    many = jax.tree.map(lambda row: jnp.broadcast_to(row, (n, *row.shape[1:])), one)
    return many.replace(key_data=jnp.stack([jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)], axis=1))


def assert_distributed(texts, joint):
    """Chi-square on the joint, cells pooled to an expected count of 5 or more; total variation of every marginal."""
    cells = np.ravel_multi_index(np.asarray(texts).T, (V,) * LENGTH)
    observed, expected = np.bincount(cells, minlength=V**LENGTH), np.asarray(joint, np.float64) * len(cells)
    assert not observed[expected == 0].any(), "a token that the target excludes"
    small = expected < 5
    observed, expected = (np.append(x[~small], x[small].sum()) for x in (observed, expected))
    if expected[-1] < 5:  # into the next larger one
        observed, expected = (np.append(x[:-2], x[-2:].sum()) for x in (observed, expected))
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4
    for position in range(LENGTH):
        others = tuple(i for i in range(LENGTH) if i != position)
        marginal = np.asarray(joint).reshape((V,) * LENGTH).sum(axis=others)
        counted = np.bincount(np.asarray(texts)[:, position], minlength=V) / len(cells)
        assert np.abs(counted - marginal).sum() / 2 < 0.02
