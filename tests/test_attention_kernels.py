"""The model's attention through its kernels says what it says without them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.block import chain_block
from qwen38_jax.drafters.mtp import mtp_forward
from qwen38_jax.layers.attention import Context, Rows, attend
from qwen38_jax.model import forward
from qwen38_jax.state import StateConfig, init_state
from tests.kernels.implementations import COMPILE_QUICKLY
from tests.models import SMALL, prompt, small_params

_attend = jax.jit(attend, static_argnames="kernels")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("page", [16, 24])
def test_every_page_size_and_no_page(page):
    """Of the sequences one is empty, one ends inside a page, one has a length and no pages; 24 has no kernel."""
    pages, table = 4, jnp.array([[4, 4], [2, 0], [4, 4]])
    rows = Rows(normal(0, 3, 5, 4, 64), jnp.zeros(0), normal(1, 3, 5, 2, 64), normal(2, 3, 5, 2, 64))
    pools = (normal(3 + i, 2, pages, page, 2, 64) for i in range(2))
    context = Context(*pools, 1, table, jnp.array([0, 20, 7]))
    mask = jnp.broadcast_to(jnp.tri(5, dtype=bool), (3, 5, 5))
    ours, theirs = (_attend(rows, mask, context, kernels=kernels) for kernels in ("interpret", "off"))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert (np.asarray(ours) == np.asarray(theirs)).all() == (page == 24)


def test_the_model_and_its_drafts_are_the_same():
    """Prefill of different lengths, in more rows than a block has; the MTP head's; a verify block after them."""
    params, tokens = small_params(), prompt(80, batch=2)
    valid = np.arange(80) < np.array([[80], [69]])

    def everything(kernels):
        cfg = dataclasses.replace(SMALL, kernels=kernels)
        state = init_state(cfg, StateConfig(2, 128, rows=4, page=16))
        block = chain_block(tokens, state.lengths, jnp.asarray(valid))
        prefilled, _, next_state = forward(params, cfg, block, state, commit=True)
        drafted, _ = mtp_forward(params, cfg, block, prefilled, state.kv, state.block_table, state.lengths)
        block = chain_block(prompt(4, batch=2, seed=1), next_state.lengths)
        verified, _, _ = forward(params, cfg, block, next_state, commit=False)
        return prefilled[valid], drafted[valid], verified

    both = jax.jit(everything, static_argnums=0, compiler_options=COMPILE_QUICKLY)
    ours, theirs = (both(kernels) for kernels in ("interpret", "off"))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
        assert (np.asarray(a) != np.asarray(b)).any()
