"""A drafter that has learned one text by heart is accepted along it; one that learned it a row off is not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.evaluation.forced import forced_acceptance
from qwen38_jax.lab.capture import Captured, Layout, capture, open_captured, plan_capture
from qwen38_jax.lab.dflash2 import DFlash2Loss, default_config, dflash2_loss
from qwen38_jax.lab.judging import dflash2_drafts, judge, mtp_drafts
from qwen38_jax.lab.mtp import MtpLoss, frozen_parts, mtp_loss
from qwen38_jax.lab.outputs import Output
from qwen38_jax.lab.windows import ResidentWindows, Windows
from qwen38_jax.params import abstract, abstract_dflash2, init_tree
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.training.loop import TrainConfig, fit, read_log
from tests.models import SMALL, small_params

DRAFTS = 3
PROMPT, LENGTH = 6, 48
LAYOUT = Layout(tap_layers=(1, 3), top=0, batch=1)
CONFIG = TrainConfig(steps=150, peak_rate=1e-2, final_rate=1e-4, warmup_steps=10, weight_decay=0.0, log_every=50)
CFG = dataclasses.replace(
    default_config(SMALL, tap_layers=(1, 3), mask_token_id=63, layers=2, intermediate=48, selector_rank=8),
    block_size=DRAFTS + 1,
    sliding_window=64,
    initializer_range=0.1,
)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    ids = np.random.default_rng(5).integers(0, 60, LENGTH).tolist()
    plan = plan_capture([Output(0, "", tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), "length", 0)], SMALL, LAYOUT, 100)
    directory = tmp_path_factory.mktemp("lab") / "states"
    capture(small_params(), SMALL, plan, directory, LAYOUT, real_vocab_size=60, identity={"checkpoint": "x"})
    return open_captured(directory)


def shifted(windows: Windows):
    """The same batches in which the model's rows are those of the token before."""

    def batch(step):
        rows = [np.roll(t, 1, axis=1) if t.ndim > 2 else t for t in windows(step)]
        return tuple(rows)

    return batch


def texts(states: Captured):
    ids = states.rows(states.texts[0], "tokens").tolist()
    return ids[:PROMPT], ids[PROMPT:]


def accepted(drafter, states) -> float:
    """The share of drafts that serving accepts along the text."""
    counts = forced_acceptance(small_params_with(drafter), SMALL, served(drafter), SpecConfig(DRAFTS), *texts(states))
    return counts.accepted.sum() / counts.drafted.sum()


def small_params_with(drafter):
    return small_params() if isinstance(drafter, DFlash2) else small_params().replace(mtp=drafter)


def served(drafter):
    return drafter if isinstance(drafter, DFlash2) else Mtp(None, DRAFTS)


def train_mtp(states, directory, wrap=lambda windows: windows):
    loss = functools.partial(mtp_loss, cfg=SMALL, settings=MtpLoss(depth_weights=(1.0,) * DRAFTS))
    windows = Windows(states, ("tokens", "hidden", "response"), 64, 1, seed=0)
    init = functools.partial(init_tree, abstract(SMALL).mtp, jax.random.key(7))
    return fit(loss, init, wrap(windows), CONFIG, directory, frozen=(frozen_parts(small_params()),)).params


def train_dflash2(states, directory, wrap=lambda windows: windows):
    loss = functools.partial(dflash2_loss, cfg=CFG, settings=DFlash2Loss(blocks_at_once=12), real_vocab_size=60)
    windows = Windows(states, ("tokens", "response", "taps"), 64, 1, seed=0, anchors=12)
    init = functools.partial(init_tree, abstract_dflash2(CFG), jax.random.key(7))
    params = fit(loss, init, wrap(windows), CONFIG, directory, frozen=(frozen_parts(small_params()),)).params
    return DFlash2(params, CFG)


@pytest.mark.parametrize("train", [train_mtp, train_dflash2])
def test_one_text_is_learned_and_then_accepted_in_serving(states, tmp_path, train):
    drafter = train(states, tmp_path)
    last = read_log(tmp_path / "log.jsonl")[-1]
    assert last.get("loss_1", last.get("ce")) < 0.1
    online = accepted(drafter, states)
    assert online > 0.95
    if train is train_mtp:
        judged = mtp_drafts(small_params_with(drafter), SMALL, DRAFTS, head=None, real_vocab_size=60)
    else:
        judged = dflash2_drafts(drafter.params, CFG, small_params(), real_vocab_size=60)
    figures = judge(judged, states, [DRAFTS])["all"]
    steps = round((LENGTH - PROMPT - 1) / figures["verify"][DRAFTS]["tokens_per_step"])
    counts = forced_acceptance(small_params_with(drafter), SMALL, served(drafter), SpecConfig(DRAFTS), *texts(states))
    assert steps == counts.steps[0], "following the drafts offline is decoding"


@pytest.mark.parametrize("train", [train_mtp, train_dflash2])
def test_rows_that_are_one_off_are_learned_but_not_accepted(states, tmp_path, train):
    drafter = train(states, tmp_path, shifted)
    assert accepted(drafter, states) < 0.6


def test_windows_on_the_device_are_those_read(states):
    fields = ("tokens", "response", "taps")
    read, resident = (kind(states, fields, 20, 3, 1, 5) for kind in (Windows, ResidentWindows))
    columns = jax.tree.map(jnp.asarray, resident.columns())
    for step in range(3):
        *expected, anchors = read(step)
        begins, counts, same = resident(step)
        jax.tree.map(np.testing.assert_array_equal, tuple(expected), resident.gather(columns, begins, counts))
        np.testing.assert_array_equal(anchors, same)
        assert (anchors < 19).all() and ((anchors == -1) | (np.take_along_axis(expected[1], anchors, 1) > 0)).all()
