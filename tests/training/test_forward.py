"""The training pass is the model's own forward without caches, and its loss counts what the weights say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.block import chain_block
from qwen38_jax.drafters.mtp import mtp_forward
from qwen38_jax.model import logits
from qwen38_jax.state import KvCache, StateConfig, init_state
from qwen38_jax.training.forward import language_model_loss, mtp_sequence, sequence_forward
from tests.models import SMALL, extend, prompt, small_params


@pytest.fixture(scope="module")
def passes():
    """Hidden rows and MTP rows of two sequences of 70 tokens (more than a chunk), by both ways."""
    params, tokens = small_params(), prompt(70, batch=2)
    hidden = jax.jit(sequence_forward, static_argnames="cfg")(params, SMALL, tokens)
    rows = jax.jit(mtp_sequence, static_argnames="cfg")(params, SMALL, tokens, hidden)
    state = init_state(SMALL, StateConfig(2, 128, page=8))
    expected, _ = extend(params, SMALL, state, tokens)
    zeros = jnp.zeros(2, jnp.int32)
    block = chain_block(tokens[:, 1:], zeros)
    kv = KvCache(state.kv.k[:1], state.kv.v[:1])
    expected_rows, _ = jax.jit(mtp_forward, static_argnames="cfg")(
        params, SMALL, block, expected[:, :-1], kv, state.block_table, zeros
    )
    return tokens, hidden, rows, expected, expected_rows


def test_equals_the_forward_with_caches(passes):
    _, hidden, rows, expected, expected_rows = passes
    np.testing.assert_allclose(hidden, expected, atol=2e-4)
    np.testing.assert_allclose(rows, expected_rows, atol=5e-4)


def test_loss_is_the_weighted_cross_entropy(passes):
    tokens, hidden, rows, _, _ = passes
    params = small_params()
    weights = jnp.asarray(np.random.default_rng(0).integers(0, 2, tokens.shape))
    total, parts = jax.jit(language_model_loss, static_argnums=(1, 4))(params, SMALL, tokens, weights, 0.5)

    def expected(scores, ahead):
        log_probs = jax.nn.log_softmax(scores, axis=-1)
        picked = np.take_along_axis(np.asarray(log_probs), np.asarray(tokens[:, ahead:, None]), axis=-1)[..., 0]
        return -(picked * weights[:, ahead:]).sum() / weights[:, ahead:].sum()

    trunk = expected(logits(params, hidden)[:, :-1], 1)
    head = expected(logits(params, rows)[:, :-1], 2)
    np.testing.assert_allclose([parts["loss"], parts["mtp_loss"], total], [trunk, head, trunk + 0.5 * head], rtol=1e-4)


def test_every_parameter_learns():
    grads = jax.jit(jax.grad(lambda p: language_model_loss(p, SMALL, prompt(70), jnp.ones((1, 70)), 0.5)[0]))(
        small_params()
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        assert np.abs(leaf).max() > 0, name
