import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.quantization import dequantize, quantize
from qwen38_jax.quantization.gptq import add_rows, empty_hessian, gptq, output_error
from qwen38_jax.quantization.tensor import unpack

N, K, GROUP = 35, 256, 32  # few shapes: each is compiled


def activations(seed=0, rows=600):
    """Rows `[rows, K]` of correlated values, of very different sizes."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(K, K)) * np.exp(rng.normal(size=K))
    return (rng.normal(size=(rows, K)) @ mix / 16).astype(np.float32)


def weights(seed=0, n=N):
    return np.random.default_rng(seed + 1000).standard_t(5, (n, K)).astype(np.float32)


def second_moment(x):
    return jnp.asarray(x.astype(np.float64).T @ x / len(x), jnp.float32)


def codes_of(quantised):
    return np.asarray(unpack(quantised.codes, quantised.bits))


# ---- the same in float64, as the paper writes it: inverse Hessian, column by column ----


def np_grid(values, bits, symmetric, shrink=1.0):
    """Scales, as fp16 holds them, and zero points `[N]` of `values [N, group]`."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        largest = np.take_along_axis(values, np.abs(values).argmax(1)[:, None], 1)[:, 0]
        return np.float64(np.float16(shrink * largest / low)), np.zeros(len(values))
    bottom, top = shrink * np.minimum(values.min(1), 0), shrink * np.maximum(values.max(1), 0)
    scale = np.float64(np.float16((top - bottom) / (high - low)))
    return scale, np.clip(np.round(low - bottom / scale), low, high)


def np_round(values, scale, zero, bits):
    """Codes, and what they stand for, of `values [N]` or `[N, group]`."""
    codes = np.clip(np.round(values / scale) + zero, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes, (codes - zero) * scale


def np_fit(values, importance, bits, symmetric, clip_search):
    best = np_grid(values, bits, symmetric)
    least = np.full(len(values), np.inf)
    for i in range(20 if clip_search else 0):
        scale, zero = np_grid(values, bits, symmetric, 1 - 0.02 * i)
        error = ((values - np_round(values, scale[:, None], zero[:, None], bits)[1]) ** 2 * importance).sum(1)
        better = error < least
        least = np.where(better, error, least)
        best = tuple(np.where(better, new, old) for new, old in zip((scale, zero), best, strict=True))
    return best


def np_gptq(w, h, bits, group, symmetric, act_order=False, clip_search=False, damping=0.01):
    """Codes and dequantised weights `[N, K]`."""
    importance = np.diag(h).copy()
    order = np.argsort(-importance, kind="stable") if act_order else np.arange(K)
    h = h[np.ix_(order, order)] + damping * importance.mean() * np.eye(K)
    factor = np.linalg.cholesky(np.linalg.inv(h)).T
    w, values, codes = w.astype(np.float64), np.zeros(w.shape), np.zeros(w.shape)
    given = w.copy()
    grids = {}
    for i, column in enumerate(order):
        g = column // group
        if g not in grids:
            span = slice(g * group, (g + 1) * group)
            source = given if act_order else w
            grids[g] = np_fit(source[:, span], importance[span], bits, symmetric, clip_search)
        codes[:, column], values[:, column] = np_round(w[:, column], *grids[g], bits)
        error = (w[:, column] - values[:, column]) / factor[i, i]
        w[:, order[i + 1 :]] -= np.outer(error, factor[i, i + 1 :])
    return codes, values


KINDS = [
    dict(bits=4, group=GROUP, symmetric=True),
    dict(bits=4, group=GROUP, symmetric=False),
    dict(bits=8, group=GROUP, symmetric=False),
    dict(bits=4, group=K, symmetric=True),
    dict(bits=4, group=GROUP, symmetric=True, clip_search=True),
    dict(bits=4, group=GROUP, symmetric=False, act_order=True, clip_search=True),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_is_the_column_loop_of_the_paper(kind):
    w, h = weights(), second_moment(activations())
    quantised, report = gptq(jnp.asarray(w), h, **kind)
    exact = np.asarray(h, np.float64)
    codes, values = np_gptq(w, exact, **kind)
    assert np.mean(codes_of(quantised) == codes) > 0.995  # a near-tie moves what follows in its row
    lost = w - values
    expected = np.sqrt(np.trace(lost @ exact @ lost.T) / np.trace(w @ exact @ w.T))
    assert report.output_error == pytest.approx(expected, rel=1e-3)
    assert (report.damping, report.dead_columns) == (0.01, 0)
    assert quantised.shape == w.shape and quantised.group == kind["group"] and quantised.group_of is None


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_outputs_err_less_than_those_of_round_to_nearest(kind, seed):
    w, x = jnp.asarray(weights(seed)), activations(seed)
    h = second_moment(x)
    nearest = quantize(w, **kind)
    _, report = gptq(w, h, **kind)
    assert report.output_error < 0.9 * output_error(w, nearest, h)


def test_the_error_is_that_of_the_outputs():
    w, x = weights(), activations()
    nearest = quantize(jnp.asarray(w), 4, GROUP)
    lost = (w - np.asarray(dequantize(nearest))) @ x.T
    told = output_error(jnp.asarray(w), nearest, second_moment(x))
    assert told == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(w @ x.T), rel=1e-4)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[5]], ids=str)
def test_without_activations_it_rounds_to_nearest(kind):
    w = jnp.asarray(weights())
    quantised, report = gptq(w, jnp.zeros((K, K)), **kind)
    same = {name: kind[name] for name in ("bits", "group", "symmetric")}
    for got, expected in zip(jax.tree.leaves(quantised), jax.tree.leaves(quantize(w, **same)), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (report.output_error, report.damping, report.dead_columns) == (0.0, 0.01, K)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_dead_column_is_rounded_to_nearest_and_disturbs_nothing(scale):
    w, x = weights(), scale * activations()
    x[:, 40] = 0
    h = second_moment(x)
    quantised, report = gptq(jnp.asarray(w), h, **KINDS[0])
    assert report.dead_columns == 1
    step = np.abs(np.asarray(quantised.scales, np.float32))[:, 40 // GROUP]
    assert (np.abs(np.asarray(dequantize(quantised)) - w)[:, 40] <= 0.501 * step).mean() > 0.9  # the rest is clipped
    # The damping is a part of the mean of what lives, whatever the size of the activations.
    codes, _ = np_gptq(w, np.asarray(h, np.float64) + np.diag(1e-30 * (np.diag(h) == 0)), 4, GROUP, True)
    assert np.mean(codes_of(quantised) == codes) > 0.98


@pytest.mark.parametrize("what", ["rank 3", "duplicated columns", "rank 3, ordered"])
def test_a_singular_hessian_is_answered_with_more_damping(what, caplog):
    x = activations()
    if what == "duplicated columns":
        x[:, 1::2] = x[:, ::2]
    else:
        x = x[:3]
    w, h = jnp.asarray(weights()), second_moment(x)
    kind = KINDS[5] if "ordered" in what else KINDS[0]
    with caplog.at_level(logging.WARNING, "qwen38_jax.quantization.gptq"):
        quantised, report = gptq(w, h, damping=0.0, **kind)
    assert report.damping >= 1e-4
    assert [record.args[0] for record in caplog.records][0] == 0.0 and "no Cholesky factor" in caplog.text
    nearest = quantize(w, 4, GROUP, symmetric=kind["symmetric"])
    assert np.isfinite(dequantize(quantised)).all() and report.output_error < output_error(w, nearest, h)
    with caplog.at_level(logging.WARNING, "qwen38_jax.quantization.gptq"):
        caplog.clear()
        _, report = gptq(w, h, **kind)
    assert not caplog.records and report.damping == 0.01


def test_what_is_no_second_moment_is_an_error(caplog):
    h = second_moment(activations())
    w = jnp.asarray(weights())
    broken = h.at[3, 5].add(100 * h.max()).at[5, 3].add(100 * h.max())
    with pytest.raises(ValueError, match="no Cholesky factor even with a damping of 10.*accumulate it anew"):
        gptq(w, broken, **KINDS[0])
    assert len(caplog.records) == 4
    for damage in (jnp.nan, -1e9):
        with pytest.raises(ValueError, match="NaN, infinity or a negative"):
            gptq(w, h.at[0, 0].set(damage), **KINDS[0])


def test_clipping_never_errs_more_where_nothing_is_coupled():
    importance = np.exp(2 * np.random.default_rng(0).normal(size=K)).astype(np.float32)
    w = jnp.asarray(weights())
    h = jnp.diag(jnp.asarray(importance))
    lost = []
    for kind in (KINDS[0], KINDS[4]):
        quantised, _ = gptq(w, h, **kind)
        lost.append((np.square(dequantize(quantised) - w) * importance).reshape(N, -1, GROUP).sum(-1))
    assert (lost[1] <= lost[0] * (1 + 1e-5)).all()
    assert lost[1].sum() < 0.9 * lost[0].sum()


def test_chunks_of_rows_change_nothing():
    kind, w, h = KINDS[5], jnp.asarray(weights()), second_moment(activations())
    whole, report = gptq(w, h, **kind)
    chunked, chunked_report = gptq(w, h, chunk_rows=13, **kind)
    for got, expected in zip(jax.tree.leaves(chunked), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert chunked_report.output_error == pytest.approx(report.output_error, rel=1e-6)


def test_weights_in_bf16():
    w, h = jnp.asarray(weights(), jnp.bfloat16), second_moment(activations())
    quantised, _ = gptq(w, h, **KINDS[0])
    same, _ = gptq(w.astype(jnp.float32), h, **KINDS[0])
    np.testing.assert_array_equal(quantised.codes, same.codes)
    assert quantised.dtype == "bfloat16" and dequantize(quantised).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "w, h, changes, words",
    [
        ((N, K), (K, K), {"group": 100}, "groups of 100 at 4 bits do not divide rows of 256"),
        ((N, K), (K, K), {"bits": 3}, "bits must be 4 or 8, got 3"),
        ((N, K), (K, K), {"damping": -0.1}, r"damping must be in \[0, 10\], got -0.1"),
        ((N, K), (K, 128), {}, r"\[35, 256\] and a Hessian \[256, 128\]"),
        ((N, 128), (K, K), {}, r"\[35, 128\] and a Hessian \[256, 256\]"),
        ((2, N, K), (K, K), {}, r"\[2, 35, 256\]"),
    ],
)
def test_what_does_not_fit(w, h, changes, words):
    with pytest.raises(ValueError, match=words):
        gptq(jnp.zeros(w), jnp.zeros(h), **{**KINDS[0], **changes})


def test_weights_that_no_scale_can_hold():
    h = second_moment(activations())
    for value in (jnp.inf, 1e7):
        with pytest.raises(ValueError, match="not finite, or too large for scales in float16"):
            gptq(jnp.asarray(weights()).at[3, 7].set(value), h, **KINDS[0])


# ---- accumulation ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_moment_of_batches_is_that_of_all_valid_rows(dtype):
    x = np.array(jnp.asarray(activations(rows=300) + 3, dtype))  # not centred
    valid = np.random.default_rng(0).random(300) < 0.8
    x[~valid] = np.nan
    hessian = empty_hessian(K)
    for start in range(0, 300, 60):
        rows = slice(start, start + 60)
        hessian = add_rows(hessian, jnp.asarray(x[rows].reshape(3, 20, K)), jnp.asarray(valid[rows].reshape(3, 20)))
    hessian = add_rows(hessian, jnp.zeros((3, 20, K)), jnp.zeros((3, 20), bool))
    kept = x[valid].astype(np.float64)
    assert int(hessian.rows) == valid.sum() and hessian.matrix.dtype == jnp.float32
    np.testing.assert_allclose(hessian.matrix, kept.T @ kept / valid.sum(), rtol=1e-5, atol=1e-4)


def test_of_no_rows_there_is_no_moment():
    hessian = add_rows(empty_hessian(K), jnp.full((3, 20, K), jnp.nan), jnp.zeros((3, 20), bool))
    assert int(hessian.rows) == 0 and not hessian.matrix.any()


def test_damaged_activations_are_counted():
    x = np.ones((3, 20, K), np.float32)
    x[0, 3, 5], x[2, 4, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match="2 of 60 activation rows hold NaN or infinity"):
        add_rows(empty_hessian(K), jnp.asarray(x))
    with pytest.raises(ValueError, match=r"\[3, 20, 256\] are not rows of 64"):
        add_rows(empty_hessian(64), jnp.asarray(x))
