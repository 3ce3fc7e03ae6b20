"""What a drafter's matrices read is what they read when it drafts, and GPTQ on it beats rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.lab.dflash2 import blocks_at, context_of
from qwen38_jax.lab.quantisation import (
    Recipe,
    calibrate,
    dflash2_inputs,
    mtp_inputs,
    quantise_dflash2,
    quantise_mtp,
)
from qwen38_jax.layers.linear import linear
from qwen38_jax.training.forward import mtp_sequence
from tests.lab.test_training import CFG, SMALL, drafter, frozen_parts, small_params, text  # noqa: F401

ANCHORS = jnp.array([7, 12, 20])


def test_blocks_taken_apart_are_those_of_serving(drafter):  # noqa: F811
    tokens, _, taps = text(1)
    target = frozen_parts(small_params())
    rows, inputs = dflash2_inputs(drafter, CFG, target, tokens, taps, ANCHORS)
    served = blocks_at(drafter, CFG, target, context_of(drafter, CFG, taps), tokens, ANCHORS[None])
    np.testing.assert_allclose(rows[:, 1:], served[0], atol=2e-5)
    matrices = {"attention.q", "attention.kv", "attention.kv.context", "attention.o", "mlp.gate_up", "mlp.down"}
    assert inputs.keys() == {"fc", *(f"layers.{n}.{m}" for n in (0, 1) for m in matrices)}


def test_the_head_taken_apart_is_the_head():
    params, (tokens, _, taps) = small_params(), text(1)
    rows, inputs = mtp_inputs(params, SMALL, tokens, taps[:, :, 0])
    np.testing.assert_allclose(rows, mtp_sequence(params, SMALL, tokens, taps[:, :, 0]), atol=2e-5)
    assert inputs.keys() == {"fc", "layer.mixer.qkv", "layer.mixer.o", "layer.mlp.gate_up", "layer.mlp.down"}


@pytest.fixture(scope="module")
def hessians(drafter):  # noqa: F811
    target = frozen_parts(small_params())
    batches = [(*text(1)[::2], ANCHORS), (*text(1)[::2], ANCHORS + 1)]
    return calibrate(lambda *batch: dflash2_inputs(drafter, CFG, target, *batch)[1], batches)


def test_gptq_keeps_outputs_better_than_rounding(drafter, hessians):  # noqa: F811
    tokens, _, taps = text(1)
    x = taps.reshape(-1, 64)
    errors = {}
    for method in ("rtn", "gptq"):
        made = quantise_dflash2(drafter, CFG, hessians, Recipe(method, group=16))
        errors[method] = float(jnp.linalg.norm(linear(x, made.fc) - linear(x, drafter.fc)))
    assert errors["gptq"] < 0.9 * errors["rtn"]


def test_recipes_do_what_they_say(drafter, hessians):  # noqa: F811
    plain, floats, blended = (
        quantise_dflash2(drafter, CFG, hessians, r)
        for r in (Recipe(group=16), Recipe(group=16, keep_fc=True), Recipe(group=16, blend_context=True))
    )
    assert floats.fc is drafter.fc and plain.fc.bits == 4
    same = jax.tree.map(lambda a, b: bool((a == b).all()), plain.layers.attention, blended.layers.attention)
    assert same.q.codes and same.o.codes and not same.kv.codes
    assert plain.selector is drafter.selector and plain.layers.attention_conv is drafter.layers.attention_conv
    with pytest.raises(ValueError, match="method"):
        Recipe("awq")


def test_the_head_is_quantised():
    params, (tokens, _, taps) = small_params(), text(1)
    found = calibrate(lambda *batch: mtp_inputs(params, SMALL, *batch)[1], [(tokens, taps[:, :, 0])])
    made = quantise_mtp(params.mtp, found, Recipe(group=16))
    assert made.layer.mixer.qkv.bits == 4 and made.norm is params.mtp.norm
    rows = mtp_sequence(params.replace(mtp=made), dataclasses.replace(SMALL), tokens, taps[:, :, 0])
    assert np.isfinite(rows).all()
