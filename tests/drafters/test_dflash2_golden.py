"""DFlash2 against numbers that its reference implementation produced, stage by stage, fp32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen38_jax.drafters import dflash2
from qwen38_jax.drafters.interface import draft_log_q
from qwen38_jax.drafters.selector import Lattice, make_lattice, walk
from qwen38_jax.layers.linear import linear
from qwen38_jax.layers.mlp import mlp
from qwen38_jax.layers.norm import plain_rms_norm
from qwen38_jax.layers.rope import text_rope_table
from qwen38_jax.model import logits
from qwen38_jax.sampling_params import SamplingParams
from tests.drafters.dflash2_golden import (
    BATCH,
    CFG,
    GREEDY,
    ROWS,
    context_of,
    observe,
    propose,
    read,
    rows_of,
    sampler_of,
    target_of,
)
from tests.golden import GOLDEN, needs_golden

pytestmark = needs_golden

# Scenario -> which call of `observe` it follows, and its sequence in the batch; three are steps of one sequence.
SCENARIOS = {"step1": (0, 0), "step2": (1, 0), "step3": (2, 0), "step3_from_scratch": (0, 1), "short_ctx": (0, 2)}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The drafter, its target, all tensors, and the context after each call."""
    drafter, tensors = read("golden_dflash2.safetensors", "weights/", tmp_path_factory.mktemp("golden"))
    target = target_of(tensors["weights/target_embed_tokens.weight"], tensors["weights/target_lm_head.weight"])
    contexts = [dflash2.init_context(CFG, BATCH)]
    for call in range(3):
        starts, sequences = np.zeros(BATCH, int), [np.zeros((2, 0, CFG.hidden_size))] * BATCH
        for name, (after, sequence) in SCENARIOS.items():
            if after == call:
                features = tensors[f"{name}/in/context_features"][0]
                starts[sequence] = tensors[f"{name}/in/position_ids"][0, 0]
                sequences[sequence] = np.stack(np.split(features, 2, axis=-1))
        contexts.append(observe(drafter, rows_of(starts, sequences), contexts[-1]))
    return drafter, target, tensors, contexts[1:]


def close(actual, expected, atol):
    np.testing.assert_allclose(np.asarray(actual), expected, atol=atol, rtol=0)


def batch(tensors, name, key):
    """An input of all sequences, those of one call; zeros where a sequence has none."""
    rows = [np.zeros_like(tensors[f"{name}/{key}"][0])] * BATCH
    for other, (call, sequence) in SCENARIOS.items():
        if call == SCENARIOS[name][0]:
            rows[sequence] = tensors[f"{other}/{key}"][0]
    return jnp.asarray(np.stack(rows))


def starts(tensors, name):
    """The anchors' positions."""
    position = functools.partial(batch, {k: t[:, -CFG.block_size :] for k, t in tensors.items() if "position" in k})
    return position(name, "in/position_ids")[:, 0].astype(jnp.int32)


def test_rotations(golden):
    table = text_rope_table(jnp.arange(64)[None], CFG.head_dim, CFG.rope_theta)
    for name in ("cos", "sin"):
        close(getattr(table, name), golden[2][f"rope/{name}_0_63"][..., : CFG.head_dim // 2], 1e-5)


@pytest.mark.parametrize("name", SCENARIOS)
def test_context(golden, name):
    drafter, _, tensors, contexts = golden
    features = tensors[f"{name}/in/context_features"]
    n = features.shape[1]
    padded = np.pad(features, ((0, 0), (0, ROWS - n), (0, 0)))
    computed = _features(drafter, np.stack(np.split(padded, 2, axis=-1)))
    close(computed[:, :n], tensors[f"{name}/ctx/hidden_norm_out"], 1e-5)
    call, sequence = SCENARIOS[name]
    context, start = contexts[call], int(starts(tensors, name)[sequence])
    positions = np.arange(max(start - CFG.sliding_window + 1, 0), start)
    slots = positions % CFG.sliding_window
    np.testing.assert_array_equal(context.positions[sequence, slots], positions)
    assert (np.asarray(context.positions[sequence]) < start).all()
    for i in range(CFG.num_hidden_layers):
        for kept, kind in ((context.k, "keys"), (context.v, "values")):
            rows = np.asarray(kept)[i, sequence, slots].swapaxes(0, 1)
            close(rows, tensors[f"{name}/layer{i}/cache_{kind}_after_crop"][0], 2e-5)


@jax.jit
def _features(drafter, taps):
    return dflash2.context_features(drafter.params, drafter.cfg, taps)


@pytest.mark.parametrize("name", SCENARIOS)
def test_mask(golden, name):
    _, _, tensors, contexts = golden
    call, sequence = SCENARIOS[name]
    start = np.asarray(starts(tensors, name))
    sees_context, sees_block = (np.asarray(mask)[sequence] for mask in _masks(contexts[call], start))
    expected = tensors[f"{name}/attn_mask"][0, 0] == 1
    assert sees_block.all() and expected[:, -CFG.block_size :].all()
    # The reference has a column for each row that it kept or was given, up to the anchor's position.
    columns = np.arange(start[sequence] - (expected.shape[1] - CFG.block_size), start[sequence])
    kept = columns > start[sequence] - CFG.sliding_window
    assert not expected[:, : -CFG.block_size][:, ~kept].any()
    slots = columns[kept] % CFG.sliding_window
    np.testing.assert_array_equal(sees_context[:, slots], expected[:, : -CFG.block_size][:, kept])


@jax.jit
def _masks(context, start):
    return dflash2.block_masks(CFG, context, start[:, None] + jnp.arange(CFG.block_size), start)


@jax.jit
def _stages(layers, i, x, context, start):
    """What the reference saved within layer i."""
    layer, k, v = jax.tree.map(lambda t: t[i], (layers, context.k, context.v))
    masks = _masks(context, start)
    norm = functools.partial(plain_rms_norm, eps=CFG.rms_norm_eps)
    rope = text_rope_table(start[:, None] + jnp.arange(CFG.block_size), CFG.head_dim, CFG.rope_theta)
    out = {"input_layernorm_out": norm(x, layer.input_norm)}
    sublayers = {
        "attention_conv": lambda h: dflash2.block_attention(layer.attention, CFG, h, rope, k, v, masks),
        "mlp_conv": functools.partial(mlp, layer.mlp),
    }
    for conv, norm_name, result in (
        ("attention_conv", "input_layernorm_out", "self_attn_out"),
        ("mlp_conv", "post_attention_layernorm_out", "mlp_out"),
    ):
        h = out[norm_name]
        kernels = dflash2.conv_kernels(getattr(layer, conv), CFG, h)
        change = kernels[:, :, 1] - getattr(layer, conv).base[1]
        out[f"{conv}/finish_delta"] = change[..., :: CFG.conv_group_size]
        out[f"{conv}/prepare_out"] = dflash2.block_conv(h, kernels[:, :, 0])
        out[result] = sublayers[conv](out[f"{conv}/prepare_out"])
        out[f"{conv}/finish_out"] = dflash2.block_conv(out[result], kernels[:, :, 1])
        x = x + out[f"{conv}/finish_out"]
        out.setdefault("post_attention_layernorm_out", norm(x, layer.post_norm))
    return out | {"layer_out": x}


@pytest.mark.parametrize("name", SCENARIOS)
def test_layers(golden, name):
    drafter, _, tensors, contexts = golden
    call, sequence = SCENARIOS[name]
    x = batch(tensors, name, "in/noise_embedding")
    for i in range(CFG.num_hidden_layers):
        stages = _stages(drafter.params.layers, i, x, contexts[call], starts(tensors, name))
        for stage, value in stages.items():
            close(value[sequence], tensors[f"{name}/layer{i}/{stage}"][0], 2e-5)
        x = batch(tensors, name, f"layer{i}/layer_out")


@jax.jit
def _block(drafter, target, context, x, anchor, start):
    """Hidden rows of the block; logits, codes and candidates of the masks' rows."""
    hidden = dflash2.block_hidden(drafter.params, CFG, context, x, start)
    drafts, selector = hidden[:, 1:], drafter.params.selector
    scores = logits(target, drafts)
    lattice = make_lattice(selector, drafts, scores, anchor, count=16, real_vocab_size=CFG.vocab_size)
    return hidden, scores, linear(drafts, selector.projection), lattice


@jax.jit
def log_q_along(scores, path, sampler):
    """`[B, D, C]`: the log-probabilities of each row's candidates after those of `path [B, D]`, indices."""
    before = jnp.pad(path[:, :-1], ((0, 0), (1, 0)))
    rows = jnp.take_along_axis(scores, before[:, :, None, None], axis=2)[:, :, 0]
    return jax.vmap(lambda row: draft_log_q(row, sampler, True), 1, 1)(rows)


def indices(ids, path):
    """Where `path [..., D]` has its tokens among the candidates `ids [..., D, C]`."""
    found = np.asarray(ids) == path[..., None]
    assert found.any(axis=-1).all()
    return found.argmax(axis=-1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_block_and_selector(golden, name):
    drafter, target, tensors, contexts = golden
    call, sequence = SCENARIOS[name]
    x, block = (batch(tensors, name, f"in/{key}") for key in ("noise_embedding", "block_ids"))
    outputs = _block(drafter, target, contexts[call], x, block[:, 0], starts(tensors, name))
    hidden, scores, row, lattice = jax.tree.map(lambda t: np.asarray(t)[sequence], outputs)
    close(hidden, tensors[f"{name}/block/final_norm_out"][0], 2e-5)
    close(scores, tensors[f"{name}/logits"][0], 5e-5)
    key = f"{name}/selector"
    np.testing.assert_array_equal(lattice.ids, tensors[f"{key}/candidates_sorted_by_unary"][0])
    close(np.take_along_axis(scores, lattice.ids, -1), tensors[f"{key}/unary_sorted"][0], 5e-5)
    close(row, tensors[f"{key}/hidden_projection_out"][0], 2e-5)
    if name in ("step1", "step2"):
        close(lattice.scores, tensors[f"{key}/vllm_edge_scores_sorted_candidates"][0], 1e-4)
    for temperature in (0.7, 1.0):
        _assert_q(outputs[3], sequence, tensors, f"{key}/T{temperature}", temperature)


def _assert_q(lattice, sequence, tensors, key, temperature):
    """The distribution along the path that the reference drew."""
    sampler = sampler_of(*[SamplingParams(temperature=temperature, seed=0)] * BATCH)
    ids = np.asarray(lattice.ids)[sequence]
    path = np.tile(indices(ids, tensors[f"{key}/path"][0]), (BATCH, 1))
    log_q = np.asarray(log_q_along(lattice.scores, path, sampler))[sequence]
    q = tensors[f"{key}/q"][0]
    for s, candidates in enumerate(tensors[f"{key}/candidates"][0].tolist()):
        close(np.exp(log_q[s]), q[s, [candidates.index(i) for i in ids[s]]], 2e-5)


@pytest.mark.parametrize("name", SCENARIOS)
def test_greedy_proposal(golden, name):
    drafter, target, tensors, contexts = golden
    call, sequence = SCENARIOS[name]
    context = context_of(batch(tensors, name, "in/block_ids")[:, 0], starts(tensors, name))
    proposal = propose(drafter, target, context, contexts[call])
    np.testing.assert_array_equal(proposal.tokens[sequence], tensors[f"{name}/selector/greedy_path"][0])
    assert (np.exp(proposal.log_q) == (proposal.candidates == proposal.tokens[..., None])).all()


def test_a_causal_block_would_show(golden):
    drafter, target, tensors, contexts = golden
    x, block = (batch(tensors, "step1", f"in/{key}") for key in ("noise_embedding", "block_ids"))
    hidden, *_ = _block(drafter, target, contexts[0], x, block[:, 0], starts(tensors, "step1"))
    assert np.abs(np.asarray(hidden)[0] - tensors["causal_variant/block/final_norm_out"][0]).max() > 0.1


def test_convolution_of_two_blocks(golden):
    """The reference has them flattened into 16 rows; here they are two sequences."""
    drafter, _, tensors, _ = golden
    x, change = (jnp.asarray(tensors[f"conv_two_blocks/{name}"]) for name in ("in", "delta_side0"))
    base = drafter.params.layers.attention_conv.base[0, 0]
    kernels = base + jnp.repeat(change, CFG.conv_group_size, axis=-1)
    out = dflash2.block_conv(x.reshape(2, 8, -1), kernels.reshape(2, 8, *kernels.shape[1:]))
    close(out.reshape(16, -1), tensors["conv_two_blocks/out_vllm"], 1e-5)


WALKS = ("greedy", "T0.7", "T0.7_topk5", "T1_topp0.9_topk20", "mixed")


@pytest.mark.parametrize("case", WALKS)
def test_walk(case):
    """The distributions along paths that another implementation drew; in greedy rows the path, too."""
    tensors = load_file(GOLDEN / "golden_lookup.safetensors")
    of_row = tensors["walk/request_state"][:, 0]
    parameters = {
        name: jnp.asarray(tensors[f"walk/{case}/{name}_by_state"][of_row]) for name in ("temperature", "top_k", "top_p")
    }
    sampler = sampler_of(GREEDY, GREEDY, GREEDY).replace(**parameters)
    greedy = np.asarray(sampler.temperature) == 0
    lattice = Lattice(jnp.asarray(tensors["walk/candidates"], jnp.int32), jnp.asarray(tensors["walk/scores"]))
    tokens = tensors[f"walk/{case}/tokens"]
    path = indices(lattice.ids, tokens)
    theirs = np.asarray(jax.nn.softmax(tensors[f"walk/{case}/realized_scores"], axis=-1))
    mine = np.exp(log_q_along(lattice.scores, path, sampler))
    close(mine[~greedy], theirs[~greedy], 1e-6)
    assert ((mine == 0) == (theirs == 0))[~greedy].all()
    positions = jnp.asarray(tensors["walk/sample_pos"], jnp.int32)
    chosen, log_q = jax.jit(walk, static_argnums=3)(lattice, sampler, positions, True)
    np.testing.assert_array_equal(np.asarray(chosen)[greedy], path[greedy])
    np.testing.assert_allclose(log_q, log_q_along(lattice.scores, chosen, sampler), atol=1e-6)
    assert np.isfinite(np.take_along_axis(np.asarray(log_q), np.asarray(chosen)[..., None], axis=2)).all()
