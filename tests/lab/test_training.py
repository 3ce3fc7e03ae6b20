"""Losses of drafters: blocks are those of serving, nothing is seen of the future, chains are those of serving."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.drafters.dflash2 import block_hidden, extend_context, init_context
from qwen38_jax.lab.dflash2 import (
    DFlash2Loss,
    blocks_at,
    context_of,
    default_config,
    dflash2_loss,
    place_weights,
)
from qwen38_jax.lab.mtp import MtpLoss, frozen_parts, mtp_loss
from qwen38_jax.layers.linear import embed
from qwen38_jax.model import logits
from qwen38_jax.params import abstract_dflash2, init_tree
from qwen38_jax.training.forward import mtp_chain, mtp_sequence
from tests.models import SMALL, prompt, small_params

CFG = dataclasses.replace(
    default_config(SMALL, tap_layers=(1, 3), mask_token_id=63, layers=2, intermediate=24, selector_rank=4, window=12),
    block_size=4,
    selector_top_k=5,
)
T = 24


@pytest.fixture(scope="module")
def drafter():
    params = init_tree(abstract_dflash2(CFG), jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda p: p + 0.1 * jax.random.normal(next(keys), p.shape), params)


def text(batch=2):
    rng = np.random.default_rng(0)
    taps = jnp.asarray(rng.standard_normal((batch, T, 2, SMALL.hidden_size)), jnp.float32)
    return prompt(T, batch), jnp.asarray(np.arange(T) >= 6, jnp.uint8)[None].repeat(batch, 0), taps


def test_blocks_are_those_of_serving(drafter):
    tokens, _, taps = text()
    target = frozen_parts(small_params())
    anchors = jnp.array([[7, 20], [13, 9]])
    found = blocks_at(drafter, CFG, target, context_of(drafter, CFG, taps), tokens, anchors)
    for b, n in ((0, 0), (0, 1), (1, 0)):
        a = int(anchors[b, n])
        context = init_context(CFG, 1)
        for begin, end in ((0, 5), (5, a)):  # as they would be committed
            at = jnp.arange(begin, end)[None]
            context = extend_context(
                drafter, CFG, context, jnp.moveaxis(taps[b : b + 1, begin:end], 2, 0), at, jnp.ones_like(at, bool)
            )
        x = embed(target.embed, jnp.array([[int(tokens[b, a]), 63, 63, 63]]))
        served = block_hidden(drafter, CFG, context, x, jnp.array([a]))[:, 1:]
        np.testing.assert_allclose(found[b, n], served[0], atol=2e-5)


def test_nothing_is_seen_of_the_future(drafter):
    """Of the context only rows before the anchor and within the window, of the text only the anchor."""
    tokens, _, taps = text(1)
    target, anchor = frozen_parts(small_params()), 15

    def rows(taps, table):
        found = blocks_at(
            drafter, CFG, target.replace(embed=table), context_of(drafter, CFG, taps), tokens, jnp.array([[anchor]])
        )
        return jnp.sum(jnp.sin(found) * jnp.arange(1, found.size + 1).reshape(found.shape))

    of_taps, of_embedding = jax.grad(rows, (0, 1))(taps, target.embed)
    seen = np.flatnonzero(np.abs(of_taps[0]).sum(axis=(1, 2)))
    assert seen.tolist() == list(range(anchor + 1 - CFG.sliding_window, anchor)), "11 rows back and none ahead"
    assert np.flatnonzero(np.abs(of_embedding).sum(axis=1)).tolist() == sorted({int(tokens[0, anchor]), 63})


@pytest.mark.parametrize("weighting", ["decay", "d-pace"])
def test_groups_of_blocks_change_nothing(drafter, weighting):
    tokens, response, taps = text()
    anchors = jnp.array([[7, 12, 20, 22], [6, 9, -1, -1]], jnp.int32)
    target = frozen_parts(small_params())

    @jax.jit
    def gradient(drafter, size=4):
        settings = DFlash2Loss(weighting=weighting, blocks_at_once=size)
        loss = lambda p: dflash2_loss(  # noqa: E731
            p, target, tokens, response, taps, anchors, cfg=CFG, settings=settings, real_vocab_size=60
        )
        return jax.value_and_grad(loss, has_aux=True)(drafter)

    whole = gradient(drafter)
    pieces = jax.jit(gradient.__wrapped__, static_argnums=1)(drafter, 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole, pieces)
    assert all(np.abs(g).sum() > 0 for g in jax.tree.leaves(whole[1])), "every parameter is trained"


def test_places_without_a_token_count_for_nothing(drafter):
    """Past the end of the text, in the prompt, and where there is no anchor."""
    ce = jnp.ones((1, 2, 3))
    counts = jnp.array([[[True, True, False], [False, False, False]]])
    for settings in (DFlash2Loss(gamma=2.0), DFlash2Loss(weighting="d-pace", alpha=0.5)):
        weights = place_weights(ce, counts, settings)
        assert (np.array(weights) > 0).tolist() == counts.tolist()
    q = 0.5 * np.exp(-1) + 0.5
    np.testing.assert_allclose(weights[0, 0], [q + q * q, q * q, 0.0], rtol=1e-6)
    np.testing.assert_allclose(
        place_weights(ce, jnp.ones_like(counts), DFlash2Loss(gamma=2.0))[0, 0], np.exp([0, -0.5, -1.0]), rtol=1e-6
    )


def test_a_chain_is_that_of_serving():
    """Depth 1 is the head over the whole text; deeper rows equal a head that is fed one token at a time."""
    from qwen38_jax.block import chain_block
    from qwen38_jax.drafters.mtp import mtp_forward
    from qwen38_jax.state import StateConfig, init_state

    params, tokens = small_params(), prompt(12)
    hidden = jax.random.normal(jax.random.key(3), (1, 12, SMALL.hidden_size))
    choose = lambda rows: jnp.argmax(logits(params, rows), axis=-1)  # noqa: E731
    chain = mtp_chain(params, SMALL, tokens, hidden, 3, choose)
    np.testing.assert_allclose(chain[0, :, :-1], mtp_sequence(params, SMALL, tokens, hidden), atol=2e-5)
    for t in (0, 6):
        state = init_state(SMALL, StateConfig(1, 64))
        kv = jax.tree.map(lambda pool: pool[:1], state.kv)
        lengths = jnp.zeros(1, jnp.int32)
        block = chain_block(tokens[:, 1 : t + 2], lengths)
        rows, kv = mtp_forward(params, SMALL, block, hidden[:, : t + 1], kv, state.block_table, lengths)
        row = rows[:, -1:]
        for d in (1, 2):
            lengths = jnp.array([t + d])
            block = chain_block(choose(row), lengths)
            row, kv = mtp_forward(params, SMALL, block, row, kv, state.block_table, lengths)
            np.testing.assert_allclose(chain[d, :, t], row[:, 0], atol=2e-5)


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_mtp_loss_counts_drafts_of_output_tokens_within_the_vocabulary(kind):
    params, tokens = small_params(), prompt(12)
    hidden = jax.random.normal(jax.random.key(3), (1, 12, SMALL.hidden_size))
    response = jnp.asarray(np.arange(12) >= 5, jnp.uint8)[None]
    vocabulary = jnp.array(sorted({*range(0, 64, 2), int(tokens[0, 7])}))

    def loss(head, tokens, hidden):
        return mtp_loss(
            head,
            frozen_parts(params),
            tokens,
            hidden,
            response,
            cfg=SMALL,
            settings=MtpLoss(kind, (1.0, 0.5)),
            vocabulary=vocabulary,
        )

    total, parts = loss(params.mtp, tokens, hidden)
    chain = np.array(logits(params, mtp_chain(params, SMALL, tokens, hidden, 2)))[..., np.array(vocabulary)]
    log_q = jax.nn.log_softmax(chain, axis=-1)
    log_p = jax.nn.log_softmax(np.array(logits(params, hidden))[..., np.array(vocabulary)], axis=-1)
    expected = []
    for d in (1, 2):
        found = []
        for t in range(4, 12 - 1 - d):  # the anchor, t + 1, is an output token
            token = int(tokens[0, t + 1 + d])
            if token in np.array(vocabulary):
                q, p = log_q[d - 1, 0, t], log_p[0, t + d]
                own = -q[int(np.searchsorted(vocabulary, token))]
                found.append(own if kind == "ce" else np.sum(np.exp(p) * (p - q)))
        expected.append(np.mean(found))
    np.testing.assert_allclose([parts["loss_1"], parts["loss_2"]], expected, rtol=1e-4)
    np.testing.assert_allclose(total, (expected[0] + 0.5 * expected[1]) / 1.5, rtol=1e-4)
    grads = jax.grad(lambda head: loss(head, tokens, hidden)[0])(params.mtp)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
