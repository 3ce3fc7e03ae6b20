"""The loop by itself, on a model of one matrix: resume is exact, logs are honest, a broken loss stops the run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from qwen38_jax.training.loop import TrainConfig, fit, make_optimizer, read_log

CONFIG = TrainConfig(steps=30, peak_rate=1e-2, final_rate=1e-3, warmup_steps=3, log_every=5)


def init():
    return {"w": jax.random.normal(jax.random.key(0), (16, 16)), "b": jnp.zeros(16)}


def batch_at(step):
    x = np.random.default_rng(step).standard_normal((8, 16)).astype(np.float32)
    return x, x[:, ::-1].copy()


def loss(params, x, y):
    error = jnp.mean((x @ params["w"] + params["b"] - y) ** 2)
    return error, {"loss": error}


MUON = {"w": MuonDimensionNumbers(0, 1), "b": None}


@pytest.mark.parametrize("muon", [None, MUON], ids=["adamw", "muon"])
def test_a_run_that_was_stopped_equals_one_that_was_not(tmp_path, muon):
    whole = fit(loss, init, batch_at, CONFIG, tmp_path / "whole", muon=muon)
    for _ in range(6):  # every stretch ends after one log line
        parts = fit(loss, init, batch_at, CONFIG, tmp_path / "parts", muon=muon, seconds=0)
    assert int(whole.step) == int(parts.step) == 30
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    logs = [[(r["step"], r["loss"]) for r in read_log(tmp_path / name / "log.jsonl")] for name in ("whole", "parts")]
    assert logs[0] == logs[1] and [step for step, _ in logs[0]] == [5, 10, 15, 20, 25, 30]
    assert logs[0][-1][1] < logs[0][0][1]


def test_finished_run_is_only_restored(tmp_path):
    first = fit(loss, init, batch_at, CONFIG, tmp_path)

    def unused(step):
        raise AssertionError("nothing is left to do")

    jax.tree.map(np.testing.assert_array_equal, first, fit(loss, init, unused, CONFIG, tmp_path))


def test_a_run_that_died_goes_on_from_its_last_save(tmp_path):
    config = dataclasses.replace(CONFIG, save_every=7)

    def dying(step):
        if step > 18:
            raise KeyboardInterrupt
        return batch_at(step)

    with pytest.raises(KeyboardInterrupt):
        fit(loss, init, dying, config, tmp_path / "dies")
    seen = []
    again = fit(loss, init, lambda step: seen.append(step) or batch_at(step), config, tmp_path / "dies")
    assert min(seen) == 14
    jax.tree.map(np.testing.assert_array_equal, again, fit(loss, init, batch_at, CONFIG, tmp_path / "whole"))


def test_log_past_the_last_save_is_cut_off(tmp_path):
    fit(loss, init, batch_at, CONFIG, tmp_path, seconds=0)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write(json.dumps({"step": 10, "loss": 1.0}) + '\n{"step": 15, "lo')
    fit(loss, init, batch_at, CONFIG, tmp_path)
    assert [r["step"] for r in read_log(tmp_path / "log.jsonl")] == [5, 10, 15, 20, 25, 30]


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    def broken(params, x, y):
        value, parts = loss(params, x * jnp.nan, y)
        return value, parts

    with pytest.raises(FloatingPointError, match="step 5"):
        fit(broken, init, batch_at, CONFIG, tmp_path)


def test_decay_where_it_is_asked_for():
    params = {"w": jnp.ones((4, 4)), "norm": jnp.ones((3, 4))}
    optimizer = make_optimizer(CONFIG, {"w": True, "norm": False})
    state = optimizer.init(params)
    for _ in range(3):  # the rate is zero at first
        changes, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
    assert np.abs(changes["w"]).max() > 0 and not np.abs(changes["norm"]).any()


def test_impossible_schedule_is_refused():
    with pytest.raises(ValueError, match="warmup_steps"):
        TrainConfig(steps=3, peak_rate=1, final_rate=0, warmup_steps=3)


def test_muon_moves_a_matrix_in_all_directions_alike():
    optimizer = make_optimizer(dataclasses.replace(CONFIG, weight_decay=0.0), muon=MUON)
    params = init()
    gradient = {"w": jnp.diag(jnp.geomspace(1e-3, 1.0, 16)), "b": jnp.ones(16)}
    state = optimizer.init(params)
    for _ in range(2):  # the first step's rate is 0
        update, state = optimizer.update(gradient, state, params)
    sizes = jnp.linalg.svd(update["w"], compute_uv=False)
    assert sizes.max() < 4 * sizes.min()  # those of the gradient differ by a thousand
    rms = float(jnp.sqrt(jnp.mean(update["w"] ** 2)))
    assert rms == pytest.approx(0.2 * CONFIG.peak_rate / CONFIG.warmup_steps, rel=0.2)
    assert jnp.allclose(update["b"], -CONFIG.peak_rate / CONFIG.warmup_steps, rtol=0.2)


def test_pieces_of_a_batch_give_the_gradient_of_the_whole(tmp_path):
    whole = fit(loss, init, batch_at, CONFIG, tmp_path / "whole")
    pieces = fit(loss, init, batch_at, dataclasses.replace(CONFIG, accumulate=4), tmp_path / "pieces")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), whole.params, pieces.params)


def test_frozen_arrays_reach_the_loss_and_stay(tmp_path):
    offset = jnp.full(16, 3.0)

    def shifted(params, offset, x, y):
        return loss({**params, "b": params["b"] + offset}, x, y)

    decays = {"w": True, "b": False}
    frozen = fit(shifted, init, batch_at, CONFIG, tmp_path / "frozen", frozen=(offset,), decays=decays)
    plain = fit(loss, lambda: {**init(), "b": jnp.array(offset)}, batch_at, CONFIG, tmp_path / "plain", decays=decays)
    np.testing.assert_allclose(frozen.params["b"] + offset, plain.params["b"], atol=1e-4)
    np.testing.assert_array_equal(offset, jnp.full(16, 3.0))
