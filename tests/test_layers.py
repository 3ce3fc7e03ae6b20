"""RoPE, norms and attention by themselves, against float64 written out in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.layers.attention import Context, Rows, attend
from qwen38_jax.layers.linear import linear
from qwen38_jax.layers.norm import gated_rms_norm, l2_norm, rms_norm
from qwen38_jax.layers.rope import apply_rope, rope_table
from qwen38_jax.model import logits
from tests.models import SMALL, small_params

# The real head: 256 channels of which 64 turn.
REAL = dataclasses.replace(SMALL, head_dim=256, rotary_dim=64, mrope_section=(11, 11, 10))


def rope64(x, position):
    """RoPE of one vector in float64: pairs (i, i + 32), wavelengths of the rotary width."""
    y = np.array(x, np.float64)
    for i in range(32):
        angle = position * 1e7 ** (-2 * i / 64)
        y[i] = x[i] * np.cos(angle) - x[i + 32] * np.sin(angle)
        y[i + 32] = x[i + 32] * np.cos(angle) + x[i] * np.sin(angle)
    return y


@pytest.mark.parametrize("position", [0, 1, 700, 2355, 100_000])
def test_partial_rope_at_short_and_long_positions(position):
    x = np.random.default_rng(0).standard_normal((1, 1, 1, 256)).astype(np.float32)
    y = np.asarray(apply_rope(jnp.asarray(x), rope_table(jnp.array([[position]]), REAL)))[0, 0, 0]
    np.testing.assert_array_equal(y[64:], x[0, 0, 0, 64:])
    # fp32 angles: the rounding of position * frequency grows with the position.
    np.testing.assert_allclose(y, rope64(x[0, 0, 0], position), atol=1e-5 + 3e-7 * position)


def test_mrope_with_equal_rows_is_plain_rope():
    positions = jnp.array([[3, 700, 2355]])
    plain, three = rope_table(positions, REAL), rope_table(jnp.stack([positions] * 3), REAL)
    np.testing.assert_array_equal(plain.cos, three.cos)
    np.testing.assert_array_equal(plain.sin, three.sin)


def test_mrope_interleaves_its_sections():
    """Pair i turns with height if i % 3 is 1, with width if it is 2, up to three times the section's length."""
    rows = rope_table(jnp.array([[[0]], [[1]], [[2]]]), REAL)
    angle = np.arctan2(np.asarray(rows.sin), np.asarray(rows.cos))[0, 0]
    which = np.round(angle / 1e7 ** (-np.arange(32) / 32)).astype(int)
    expected = [1 if i % 3 == 1 and i < 33 else 2 if i % 3 == 2 and i < 30 else 0 for i in range(32)]
    np.testing.assert_array_equal(which, expected)


def test_norm_conventions():
    """The zero-centred weight is 1 + w, once; the gated norm's weight is plain."""
    rng = np.random.default_rng(0)
    x, w, z = rng.standard_normal((3, 5, 8))
    unit = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    args = [jnp.asarray(t, jnp.float32) for t in (x, w, z)]
    np.testing.assert_allclose(rms_norm(args[0], args[1][0], 1e-6), unit * (1 + w[0]), atol=1e-5)
    gated = unit * w[0] * (z / (1 + np.exp(-z)))
    np.testing.assert_allclose(gated_rms_norm(args[0], args[2], args[1][0], 1e-6), gated, atol=1e-5)
    np.testing.assert_allclose(l2_norm(args[0]), x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), atol=1e-6)


def test_products_are_summed_in_fp32():
    x = jnp.ones((1, 4096), jnp.bfloat16)
    assert float(linear(x, jnp.ones((1, 4096), jnp.bfloat16), jnp.float32)[0, 0]) == 4096


def attention64(q, k, v, mask):
    """Softmax attention in float64: q [L, H, D], k, v [S, G, D], mask [L, S]."""
    heads, groups = q.shape[1], k.shape[1]
    out = np.zeros(q.shape)
    for h in range(heads):
        kh, vh = k[:, h // (heads // groups)], v[:, h // (heads // groups)]
        scores = np.where(mask, q[:, h] @ kh.T / np.sqrt(q.shape[-1]), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ vh
    return out


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 23, 511, 512, 513, 1000])
def test_attention_over_pages_and_block(length):
    """Contexts around page and chunk boundaries, pages out of order, NaN in everything that must not be read."""
    rng = np.random.default_rng(length)
    page, max_pages, rows = 8, 128, 3
    q, k, v = (rng.standard_normal((rows, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    past = rng.standard_normal((2, length, 2, 16)).astype(np.float32)
    pool = np.full((2, 1, max_pages + 1, page, 2, 16), np.nan, np.float32)
    table = rng.permutation(max_pages + 1)[:max_pages].astype(np.int32)
    for i in range(length):
        pool[:, 0, table[i // page], i % page] = past[:, i]
    table[-(-length // page) :] = max_pages + 1  # no page assigned
    context = Context(*map(jnp.asarray, pool), 0, jnp.asarray(table[None]), jnp.array([length]))
    block = Rows(jnp.asarray(q[None]), jnp.zeros(0), jnp.asarray(k[None]), jnp.asarray(v[None]))
    own = np.tri(rows, dtype=bool)
    out = _ATTEND(block, jnp.asarray(own[None]), context)
    mask = np.concatenate([np.ones((rows, length), bool), own], axis=1)
    expected = attention64(q, np.concatenate([past[0], k]), np.concatenate([past[1], v]), mask)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


_ATTEND = jax.jit(attend)


def test_tied_head_is_the_embedding():
    params, h = small_params().replace(lm_head=None), jnp.ones((1, 2, SMALL.hidden_size))
    np.testing.assert_allclose(logits(params, h), h @ params.embed.T, rtol=1e-5)


def test_row_that_sees_nothing_is_zero():
    rows = Rows(
        jnp.ones((1, 2, 4, 16)), jnp.zeros(0), jnp.full((1, 2, 2, 16), jnp.nan), jnp.full((1, 2, 2, 16), jnp.nan)
    )
    assert not np.asarray(attend(rows, jnp.zeros((1, 2, 2), bool))).any()
