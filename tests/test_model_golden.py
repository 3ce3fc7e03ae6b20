"""The text model and its MTP head against numbers that the PyTorch implementation produced, fp32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen38_jax.block import Block, chain_block
from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.drafters.mtp import mtp_forward
from qwen38_jax.layers import gated_delta_net as gdn
from qwen38_jax.layers.norm import gated_rms_norm, l2_norm, rms_norm
from qwen38_jax.layers.rope import rope_table
from qwen38_jax.model import logits
from qwen38_jax.state import KvCache, StateConfig, accept, flush, init_state
from tests.golden import GOLDEN, needs_golden
from tests.models import committed, extend, run, with_dtype

pytestmark = needs_golden

PROMPTS = [(m, p) for m in ("tiny_qwen3_5", "realdims_qwen3_5") for p in ("p0", "p1", "p2")][:5]
BUCKET = 256  # prompts are padded to it: one program for all lengths, and padding must not matter
ATOL = 1e-3


@functools.cache
def load(model: str):
    checkpoint = load_checkpoint(GOLDEN / model)
    return checkpoint.params, checkpoint.cfg, load_file(GOLDEN / f"{model}_activations.safetensors")


def close(actual, expected, atol=ATOL):
    np.testing.assert_allclose(np.asarray(actual), expected, atol=atol, rtol=0)


@functools.cache
def prefilled(model: str, name: str):
    """Hidden rows, taps of every layer and the state after the prompt."""
    params, cfg, golden = load(model)
    ids = golden[f"{name}.input_ids"]
    state = init_state(cfg, StateConfig(1, BUCKET + 64, rows=8, page=16))
    tokens = np.zeros((1, BUCKET), np.int32)
    tokens[0, : len(ids)] = ids
    block = chain_block(jnp.asarray(tokens), state.lengths, jnp.arange(BUCKET)[None] < len(ids))
    hidden, taps, state = run(params, cfg, block, state, commit=True, tap_layers=tuple(range(cfg.num_hidden_layers)))
    return hidden[0, : len(ids)], taps[:, 0, : len(ids)], state


def assert_state(state, cfg, golden, key):
    """Every array that the reference saved under `key`: recurrent and convolution state, keys and values."""
    kinds = {kind: iter(range(cfg.num_hidden_layers)) for kind in set(cfg.layer_types)}
    keys, values = (committed(state, pool)[:, 0] for pool in (state.kv.k, state.kv.v))
    compared = 0
    for layer, kind in enumerate(cfg.layer_types):
        i = next(kinds[kind])
        if f"{key}.L{layer}.recurrent_state" in golden:
            close(state.recurrent[i, 0], golden[f"{key}.L{layer}.recurrent_state"])
            # The reference keeps four columns, of which the oldest is never read again.
            close(state.conv[i, 0], golden[f"{key}.L{layer}.conv_state"].T[-3:])
            compared += 1
        if f"{key}.L{layer}.k_cache" in golden:
            close(keys[i], golden[f"{key}.L{layer}.k_cache"].swapaxes(0, 1))
            close(values[i], golden[f"{key}.L{layer}.v_cache"].swapaxes(0, 1))
            compared += 1
    assert compared, f"no golden state under {key}"


@pytest.mark.parametrize("model,name", PROMPTS)
def test_prefill(model, name):
    params, cfg, golden = load(model)
    hidden, taps, state = prefilled(model, name)
    for layer in range(cfg.num_hidden_layers):
        close(taps[layer], golden[f"{name}.L{layer}.out"])
    close(hidden, golden[f"{name}.final_norm"])
    scores = logits(params, hidden)
    close(scores, golden[f"{name}.prefill_logits"])
    assert int(jnp.argmax(scores[-1])) == golden[f"{name}.greedy_tokens"][0]
    assert_state(state, cfg, golden, f"{name}.prefill")


@pytest.mark.parametrize("model,name", PROMPTS)
def test_greedy_decoding(model, name):
    params, cfg, golden = load(model)
    state = prefilled(model, name)[2]
    tokens = golden[f"{name}.greedy_tokens"]
    for step in range(16):
        hidden, state = extend(params, cfg, state, jnp.asarray(tokens[None, step : step + 1]))
        scores = logits(params, hidden)[0, 0]
        close(scores, golden[f"{name}.decode_logits"][step])
        close(hidden[0, 0], golden[f"{name}.decode_final_norm"][step])
        assert int(jnp.argmax(scores)) == tokens[step + 1]
        if f"{name}.after_decode{step}.L0.recurrent_state" in golden:
            assert_state(state, cfg, golden, f"{name}.after_decode{step}")
    if model == "tiny_qwen3_5":  # the other file keeps fewer states
        assert_state(state, cfg, golden, f"{name}.after_decode_all")


def verified(model, name):
    params, cfg, golden = load(model)
    state = prefilled(model, name)[2]
    block = chain_block(jnp.asarray(golden[f"{name}.greedy_tokens"][None, :5]), state.lengths)
    hidden, _, state = run(params, cfg, block, state, commit=False)
    return hidden, state


@pytest.mark.parametrize("model,name", PROMPTS)
def test_verify_block(model, name):
    params, cfg, golden = load(model)
    hidden, state = verified(model, name)
    close(logits(params, hidden)[0], golden[f"{name}.verify_logits"])
    if f"{name}.after_verify.L0.recurrent_state" in golden:
        assert_state(flush(accept(state, jnp.array([5]))), cfg, golden, f"{name}.after_verify")


@pytest.mark.parametrize("accepted", [1, 3, 5])
@pytest.mark.parametrize("name", ["p0", "p1", "p2"])
def test_partly_accepted_block(name, accepted):
    _, cfg, golden = load("tiny_qwen3_5")
    _, state = verified("tiny_qwen3_5", name)
    assert_state(flush(accept(state, jnp.array([accepted]))), cfg, golden, f"{name}.after_decode{accepted - 1}")


@pytest.mark.parametrize("model", ["tiny_qwen3_5", "realdims_qwen3_5"])
def test_resume_from_snapshot(model):
    params, cfg, golden = load(model)
    ids = jnp.asarray(golden["p0.input_ids"])[None]
    state = init_state(cfg, StateConfig(1, BUCKET, page=16))
    _, state = extend(params, cfg, state, ids[:, :128], chunk=64)
    if model == "tiny_qwen3_5":
        assert_state(state, cfg, golden, "p0.snapshot128")
    snapshot = jax.tree.map(np.array, state)
    extend(params, cfg, state, ids[:, :64], chunk=64)  # goes on elsewhere: the snapshot must not notice
    hidden, _ = extend(params, cfg, jax.tree.map(jnp.asarray, snapshot), ids[:, 128:], chunk=64)
    close(logits(params, hidden)[0], golden["p0.prefill_logits"][128:])


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_any_chunking_equals_one_shot(chunk):
    params, cfg, golden = load("tiny_qwen3_5")
    ids = jnp.asarray(golden["p0.input_ids"])[None]
    state = init_state(cfg, StateConfig(1, BUCKET, page=16))
    hidden, state = extend(params, cfg, state, ids, chunk)
    close(logits(params, hidden)[0], golden["p0.prefill_logits"])
    assert_state(state, cfg, golden, "p0.prefill")


@pytest.mark.parametrize("model", ["tiny_qwen3_5", "realdims_qwen3_5"])
def test_parts_of_the_first_linear_layer(model):
    params, cfg, golden = load(model)
    layer = jax.tree.map(lambda t: t[0], params.linear)
    x = params.embed[golden["p0.input_ids"]][None]
    n = x.shape[1]
    block = chain_block(jnp.zeros((1, n), jnp.int32), jnp.zeros(1, jnp.int32))
    h = rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
    columns, z = jnp.split(h @ layer.mixer.qkvz.T, [cfg.conv_channels], axis=-1)
    b, a = jnp.split(h @ layer.mixer.ba.T, 2, axis=-1)
    window = jnp.zeros((1, 3, cfg.conv_channels))
    mixed, _ = gdn.short_conv(layer.mixer.conv, columns, window, block)
    inputs = gdn.normalise(gdn.make_inputs(layer.mixer, cfg, h, mixed), block.valid)
    shape = (cfg.linear_num_value_heads, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
    core, *_ = gdn.delta_rule(inputs, jnp.zeros((1, *shape)), block)
    z = z.reshape(1, n, shape[0], shape[2])
    normed = gated_rms_norm(core, z, layer.mixer.norm, cfg.rms_norm_eps)
    rope = rope_table(block.positions, cfg)
    ours = {
        "gdn0.in_proj_qkv.out": columns,
        "gdn0.conv_silu.out": mixed,
        "gdn0.in_proj_z.out": z.reshape(1, n, -1),
        "gdn0.in_proj_a.out": a,
        "gdn0.in_proj_b.out": b,
        "gdn0.q": inputs.q * cfg.linear_key_head_dim**0.5,
        "gdn0.k": inputs.k,
        "gdn0.v": inputs.v,
        "gdn0.g": inputs.g,
        "gdn0.beta": inputs.beta,
        "gdn0.core_out": core,
        "gdn0.norm.in": core,
        "gdn0.norm.out": normed,
        "gdn0.out_proj.out": normed.reshape(1, n, -1) @ layer.mixer.out.T,
        # The reference repeats the angles for both halves of a pair.
        "rope.out0": jnp.concatenate([rope.cos, rope.cos], axis=-1),
        "rope.out1": jnp.concatenate([rope.sin, rope.sin], axis=-1),
    }
    for name, value in ours.items():
        expected = golden[f"p0.probe.{name}"]
        if name in ("gdn0.q", "gdn0.k"):
            expected = l2_norm(jnp.asarray(expected))  # saved before it
        close(value[0, -len(expected) :].reshape(expected.shape), expected, atol=2e-4)


@pytest.mark.parametrize("model", ["tiny_qwen3_5", "realdims_qwen3_5"])
def test_bf16_is_as_close_as_the_reference_in_bf16(model):
    """Rounding differs by code path, so the yardstick is the reference's own distance between bf16 and fp32."""
    params, cfg, golden = load(model)
    params, cfg = with_dtype(params, cfg, "bfloat16")
    exact = golden["p0.prefill_logits"]
    hidden, state = extend(
        params, cfg, init_state(cfg, StateConfig(1, BUCKET)), jnp.asarray(golden["p0.input_ids"])[None]
    )
    assert hidden.dtype == jnp.bfloat16 and state.recurrent.dtype == jnp.float32
    rms = lambda x: float(np.sqrt(np.mean(np.square(x))))  # noqa: E731
    ours, theirs = (
        rms(x - exact) for x in (np.asarray(logits(params, hidden)[0]), golden["p0.prefill_logits_bf16run"])
    )
    assert ours < 1.25 * theirs, (ours, theirs)


class TestMtp:
    """The MTP head: a pass over the prompt, four chained drafts, and the rerun of accepted rows."""

    @pytest.fixture(params=["p0", "p1"])
    def case(self, request):
        params, cfg, golden = load("tiny_qwen3_5")
        ids = golden[f"mtp.{request.param}.shifted_ids"]
        state = init_state(cfg, StateConfig(1, BUCKET, page=16))
        kv = KvCache(state.kv.k[:1], state.kv.v[:1])
        call = jax.jit(mtp_forward, static_argnames="cfg")

        def rows(kv, tokens, hidden, at):
            tokens = jnp.asarray(np.asarray(tokens, np.int32))[None]
            block = chain_block(tokens, jnp.array([at]))
            return call(params, cfg, block, jnp.asarray(hidden)[None], kv, state.block_table, jnp.array([at]))

        hidden, kv = rows(kv, ids, golden[f"{request.param}.final_norm"], 0)
        close(hidden[0], golden[f"mtp.{request.param}.first_pass_hidden"])
        return params, golden, request.param, rows, hidden[0], kv, len(ids)

    def test_chained_drafts(self, case):
        params, golden, name, rows, hidden, kv, length = case
        row = hidden[-1:]
        close(logits(params, row)[0], golden[f"mtp.{name}.first_pass_logits_last"])
        for step, expected in enumerate(golden[f"mtp.{name}.draft_tokens"]):
            close(row[0], golden[f"mtp.{name}.draft_hidden"][step])
            scores = logits(params, row)[0]
            close(scores, golden[f"mtp.{name}.draft_logits"][step])
            assert int(jnp.argmax(scores)) == expected
            row, kv = rows(kv, [expected], row, length + step)
            row = row[0]

    def test_accepted_rows_replace_the_chained_ones(self, case):
        params, golden, name, rows, hidden, kv, length = case
        _, kv = rows(kv, [7], hidden[-1:], length)  # what a chained draft left behind
        tokens = golden[f"{name}.greedy_tokens"][1:4]
        again, _ = rows(kv, tokens, golden[f"{name}.decode_final_norm"][:3], length)
        close(again[0], golden[f"mtp.{name}.step2_hidden"])


def test_composite_checkpoint_is_the_same_model():
    params, cfg, golden = load("tiny_qwen3_5")
    composite = load_checkpoint(GOLDEN / "tiny_qwen3_5_composite")
    assert composite.cfg == cfg
    assert composite.prefix != load_checkpoint(GOLDEN / "tiny_qwen3_5").prefix
    jax.tree.map(np.testing.assert_array_equal, composite.params, params)


def test_block_of_padding_changes_nothing():
    params, cfg, golden = load("tiny_qwen3_5")
    state = prefilled("tiny_qwen3_5", "p0")[2]
    block = Block(jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 5), bool))
    _, _, after = run(params, cfg, block, state, commit=True)
    jax.tree.map(np.testing.assert_array_equal, after, state)
