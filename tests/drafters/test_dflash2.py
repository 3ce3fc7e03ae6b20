"""The DFlash2 drafter where the golden files do not reach: its cache over time, batches, free space, dtypes, faults."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.checkpoint import load_drafter
from qwen38_jax.checkpoint.synthetic import recipe, write
from qwen38_jax.drafters import dflash2
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.interface import DFLASH2
from qwen38_jax.params import abstract_dflash2
from qwen38_jax.quantization import QuantTensor, dequantize, quantize
from qwen38_jax.sampling_params import SamplingParams
from tests.drafters.dflash2_golden import (
    BATCH,
    CFG,
    GREEDY,
    context_of,
    hidden_of,
    observe,
    propose,
    rows_of,
    target_of,
)

W, BLOCK = CFG.sliding_window, CFG.block_size
SAMPLED = SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=7)


@functools.cache
def drafter() -> DFlash2:
    """Random weights at which every part counts."""
    infos, treedef = jax.tree.flatten(abstract_dflash2(CFG))
    rng = np.random.default_rng(0)
    leaves = []
    for info in infos:
        if info.axes[-1] in ("norm", "hidden") and "tap" in info.axes or info.axes[-1] == "norm":
            leaf = 0.7 + 0.3 * rng.normal(size=info.shape)
        else:
            leaf = rng.normal(size=info.shape) * info.shape[-1] ** -0.5
        leaves.append(jnp.asarray(leaf, jnp.float32))
    return DFlash2(jax.tree.unflatten(treedef, leaves), CFG)


@functools.cache
def target():
    rng = np.random.default_rng(1)
    return target_of(*(rng.normal(size=(CFG.vocab_size, CFG.hidden_size)).astype(np.float32) for _ in range(2)))


@functools.cache
def taps() -> np.ndarray:
    """Of all positions, more than five windows."""
    shape = (len(CFG.target_layer_ids), BATCH, CFG.max_position_embeddings, CFG.hidden_size)
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)


def fill(context, starts, ends, chunk, garbage=np.nan):
    """Observes the rows of each sequence from `starts [B]` to `ends [B]`, `chunk` at a time, padded on either side."""
    starts, call = np.array(starts), 0
    while (starts < ends).any():
        stops = np.minimum(starts + chunk, ends)
        sequences = [taps()[:, b, starts[b] : stops[b]] for b in range(BATCH)]
        context = observe(drafter(), rows_of(starts, sequences, garbage=garbage, left=bool(call % 2)), context)
        starts, call = stops, call + 1
    return context


def poisoned():
    """An empty cache whose free space is NaN."""
    context = dflash2.init_context(CFG, BATCH)
    return context.replace(k=jnp.full_like(context.k, jnp.nan), v=jnp.full_like(context.v, jnp.nan))


ANCHORS = [3, 77, 120]


def drafts(context, positions, requests=(GREEDY, SAMPLED, GREEDY), anchors=ANCHORS):
    return propose(drafter(), target(), context_of(anchors, positions, *requests), context)


def assert_same(a, b, rows=slice(None), atol=1e-5):
    np.testing.assert_array_equal(a.tokens[rows], b.tokens[rows])
    np.testing.assert_array_equal(a.candidates[rows], b.candidates[rows])
    np.testing.assert_allclose(np.exp(a.log_q[rows]), np.exp(b.log_q[rows]), atol=atol)


ENDS = [(0, 3, W - 1), (W, W + 1, 50), (96, 96, 9)]


@functools.cache
def at_once(ends):
    return fill(poisoned(), [max(end - W + 1, 0) for end in ends], ends, 40)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_context_grows_in_any_pieces(ends, chunk):
    """Wrapped or not, the cache leads to the drafts of a fresh one with just the rows that a block may see."""
    context = fill(poisoned(), [0, 0, 0], ends, chunk)
    assert_same(drafts(context, ends), drafts(at_once(ends), ends))
    for b, end in enumerate(ends):
        assert sorted(p for p in context.positions[b].tolist() if p >= 0) == list(range(max(end - W, 0), end))


def test_a_chunk_longer_than_the_ring_leaves_its_end():
    ends = (40, 39, 38)
    context = fill(poisoned(), [0, 0, 0], ends, 40)
    for positions, end in zip(context.positions, ends, strict=True):
        assert sorted(positions.tolist()) == list(range(end - W, end))
    assert_same(drafts(context, ends), drafts(at_once(ends), ends))


def test_rejected_rows_leave_no_trace():
    """Verify blocks of which 1 to 8 rows stay, far beyond the window; in the others are NaN, or else numbers."""
    rng = np.random.default_rng(3)
    contexts = [poisoned(), poisoned()]
    ends = np.zeros(BATCH, int)
    for _ in range(12):
        more = np.minimum(ends + rng.integers(1, BLOCK + 1, BATCH), 100)
        contexts = [fill(c, ends, more, BLOCK, garbage) for c, garbage in zip(contexts, (np.nan, 1e3), strict=True)]
        ends = more
    assert ends.min() > W
    for a, b in zip(jax.tree.leaves(contexts[0]), jax.tree.leaves(contexts[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same(drafts(contexts[0], ends), drafts(at_once(tuple(ends.tolist())), ends))


def test_a_slot_forgets_its_last_text():
    ends = (70, 30, 70)
    context = fill(poisoned(), (0, 0, 0), ends, 40)
    new = fill(context, (0, 0, 70), (10, 30, 75), 4)
    fresh = fill(poisoned(), (0, 0, 40), (10, 30, 75), 4)
    np.testing.assert_array_equal(new.positions[:2], fresh.positions[:2])
    assert_same(drafts(new, (10, 30, 75)), drafts(fresh, (10, 30, 75)))


def test_rows_that_are_not_finite_are_left_out():
    ends = (20, 20, 20)
    context = fill(poisoned(), (0, 0, 0), ends, 40)
    broken = [np.full((2, 30, CFG.hidden_size), value) for value in (np.nan, np.inf, -np.inf)]
    after = observe(drafter(), rows_of(ends, broken), context)
    for a, b in zip(jax.tree.leaves(context), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_neighbours_and_slots_do_not_matter():
    ends, requests = np.array([0, 50, 9]), [GREEDY, SAMPLED, SAMPLED]
    base = drafts(at_once(tuple(ends.tolist())), ends, requests)
    order = np.array([2, 0, 1])
    context = at_once(tuple(ends.tolist()))
    moved = dflash2.ContextCache(context.k[:, order], context.v[:, order], context.positions[order])
    again = drafts(moved, ends[order], [requests[b] for b in order], np.array(ANCHORS)[order])
    assert_same(again, jax.tree.map(lambda t: t[order], base))
    # Another text beside it.
    context = fill(context, (0, 0, 9), (0, 17, 9), 40)
    assert_same(drafts(context, (0, 17, 9), requests), base, rows=np.array([0, 2]))


def test_drafts_depend_on_what_they_should():
    ends = (40, 40, 40)
    context = at_once(ends)
    base = drafts(context, ends)
    assert base.tokens.shape == (BATCH, BLOCK - 1) and (base.source == DFLASH2).all()
    assert base.valid.all() and not base.point_mass.any()
    drawn = np.take_along_axis(np.asarray(base.candidates), np.asarray(base.log_q.argmax(-1))[..., None], -1)[..., 0]
    np.testing.assert_array_equal(drawn[0], base.tokens[0])  # greedy
    assert (np.isfinite(base.log_q[1]).sum(axis=-1) <= 12).all()  # top-k
    np.testing.assert_allclose(np.exp(base.log_q).sum(axis=-1), 1, atol=1e-5)
    same_for = functools.partial(_same_log_q, base)
    assert not same_for(drafts(context, ends, anchors=[4, 78, 121])).any()
    assert not same_for(drafts(context, (41, 41, 41))).any()  # a row further: keys turn, and one leaves the window
    wider = drafts(context, ends, (GREEDY, dataclasses.replace(SAMPLED, top_k=16, top_p=1.0), GREEDY))
    np.testing.assert_array_equal(same_for(wider), [True, False, True])


def _same_log_q(a, b):
    same = np.isclose(np.exp(a.log_q), np.exp(b.log_q), atol=1e-6) & (a.candidates == b.candidates)[..., None].all()
    return np.asarray(same).all(axis=(1, 2))


def test_positions_at_the_context_limit_are_shared():
    """Behind the last position masks are one and the same row to a drafter without convolutions."""
    limit = CFG.max_position_embeddings
    ends = (limit - 1, limit - 4, 20)
    x = jnp.ones((BATCH, BLOCK, CFG.hidden_size))
    hidden = np.asarray(hidden_of(DFlash2(_still(drafter().params), CFG), at_once(ends), x, jnp.array(ends)))
    assert np.isfinite(hidden).all()
    same = np.abs(hidden - hidden[:, -1:]).max(axis=-1) < 1e-6
    np.testing.assert_array_equal(same.sum(axis=1), [8, 5, 1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_weights_give_ids_in_range(value):
    ends = (40, 40, 40)
    params = drafter().params
    codes = np.array(params.selector.successors)
    codes[5:60] = value
    broken = dataclasses.replace(drafter(), params=params.replace(selector=params.selector.replace(successors=codes)))
    head = np.array(target().lm_head)
    head[20:40] = value
    for lm_head in (head, head * np.nan):
        context = context_of(ANCHORS, ends, GREEDY, SAMPLED, GREEDY)
        proposal = propose(broken, target().replace(lm_head=lm_head), context, at_once(ends))
        assert ((proposal.tokens >= 0) & (proposal.tokens < CFG.vocab_size)).all()
        assert ((proposal.candidates >= 0) & (proposal.candidates < CFG.vocab_size)).all()
        assert not np.isnan(proposal.log_q).any()
        np.testing.assert_allclose(np.exp(proposal.log_q).sum(axis=-1), 1, atol=1e-5)
        chosen = proposal.candidates == proposal.tokens[..., None]
        assert np.isfinite(np.where(chosen, proposal.log_q, 0)).all()


def test_parts_can_be_left_out():
    """Convolutions that pass a row on, and codes of zero, are none at all."""
    ends = (40, 40, 40)
    params, context = drafter().params, at_once(ends)
    zeros = jax.tree.map(np.zeros_like, params.selector)
    still = _still(params).replace(selector=zeros)
    args = context_of(ANCHORS, ends, GREEDY, SAMPLED, GREEDY)
    neutral = propose(DFlash2(still, CFG), target(), args, context)
    plain = still.replace(selector=None, layers=still.layers.replace(attention_conv=None, mlp_conv=None))
    cfg = dataclasses.replace(CFG, conv_kernel_size=None, selector_rank=None)
    assert jax.tree.structure(plain) == jax.tree.structure(abstract_dflash2(cfg))
    assert_same(propose(DFlash2(plain, cfg), target(), args, context), neutral)


def _still(params):
    """The drafter with convolutions that do nothing."""
    conv = params.layers.mlp_conv
    identity = np.zeros_like(conv.base)
    identity[:, :, 0] = 1
    still = conv.replace(base=identity, projection=np.zeros_like(conv.projection))
    return params.replace(layers=params.layers.replace(attention_conv=still, mlp_conv=still))


def test_quantised_weights_equal_what_they_stand_for(tmp_path):
    write(tmp_path / "m", recipe("qwen3.8-27b-dflash2-w4a16", scale="small"))
    params, cfg = load_drafter(tmp_path / "m", dtype="float32")
    assert isinstance(params.fc, QuantTensor) and isinstance(params.layers.attention.kv, QuantTensor)
    rng = np.random.default_rng(4)
    values = jnp.asarray(rng.normal(size=(5, 1, 9, cfg.hidden_size)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(1, cfg.block_size, cfg.hidden_size)), jnp.float32)

    @jax.jit
    def run(params):
        positions = jnp.arange(9)[None]
        context = dflash2.init_context(cfg, 1)
        context = dflash2.extend_context(params, cfg, context, values, positions, positions >= 0)
        return dflash2.block_hidden(params, cfg, context, x, jnp.array([9]))

    np.testing.assert_allclose(run(params), run(_dense(params)), atol=2e-5)


@jax.jit
def _dense(params):
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QuantTensor) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantTensor),
    )


def test_half_precision():
    """Statistics and scores stay fp32, and the rows are those of the fp32 drafter within rounding."""
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    half = DFlash2(_half(drafter().params), cfg)
    ends = (40, 40, 40)
    fp32 = at_once(ends)
    context = fp32.replace(k=_half(fp32.k), v=_half(fp32.v))
    x = np.random.default_rng(5).normal(size=(BATCH, BLOCK, CFG.hidden_size)).astype(np.float32)
    rows = [hidden_of(d, c, x, jnp.array(ends)) for d, c in ((drafter(), fp32), (half, context))]
    assert rows[1].dtype == jnp.bfloat16
    error = np.asarray(rows[1], np.float32) - rows[0]
    assert 0 < np.sqrt((error**2).mean()) < 0.03 * np.sqrt(np.mean(np.square(rows[0])))
    head = jax.eval_shape(lambda head: quantize(head, 8, 64), target().lm_head)
    args = context_of(ANCHORS, ends, GREEDY, SAMPLED, GREEDY)
    proposal = jax.eval_shape(propose, half, target().replace(lm_head=head), args, context)
    assert proposal.log_q.dtype == jnp.float32 and proposal.tokens.dtype == jnp.int32
    assert dflash2.abstract_context(cfg, 1).k.dtype == jnp.bfloat16


def _half(tree):
    return jax.tree.map(lambda t: np.asarray(t).astype(jnp.bfloat16), tree)


def test_a_drafter_for_another_model_is_refused():
    model = types.SimpleNamespace(vocab_size=128, hidden_size=64, num_hidden_layers=4)
    sizes = types.SimpleNamespace(batch=2)
    assert drafter().init(model, sizes).positions.shape == (2, W)
    assert drafter().draft_tokens == 7 and drafter().tap_layers == (0, 2)
    for name, words in (
        ("vocab_size", "vocab_size = 128, but the model has vocab_size = 1"),
        ("hidden_size", "hidden_size = 64"),
        ("num_hidden_layers", "num_target_layers = 4, but the model has num_hidden_layers = 1"),
    ):
        with pytest.raises(ValueError, match=words):
            drafter().init(types.SimpleNamespace(**{**vars(model), name: 1}), sizes)
