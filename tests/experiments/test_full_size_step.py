import json

import jax
import jax.numpy as jnp
import pytest

from experiments import full_size_step, harness
from experiments.full_size_step import Step, faults_of, main, moved_bytes, parts_of, random_params
from experiments.hlo import large_copies, packed_leaves, without_kernel
from qwen38_jax.checkpoint.synthetic import FULL, SMALL
from qwen38_jax.params import abstract, tree_bytes
from qwen38_jax.quantization import dequantize
from qwen38_jax.state import StateConfig, abstract_state

PROGRAM = """
%body {
  %copy.1 = f32[1,4]{1,0} copy(%a)
  ROOT %copy.2 = bf16[48,1024,64]{2,1,0} copy(%b), metadata={op_name="x"}
  %copy-start.3 = (s8[4194304]{0}, s8[4194304]{0}, u32[]) copy-start(%c)
  %fusion.4 = f32[9999999]{0} fusion(%copy.2), calls=%copy_computation
  %bitcast.7 = s32[6,8192]{1,0} bitcast(%w)
  %bitcast.8 = s32[6,4096]{1,0} bitcast(%v)
  %pallas_call.5 = f32[8] custom-call(%i, %x, %bitcast.7), custom_call_target="__gpu$xla.gpu.triton", metadata={}
}
"""


@pytest.fixture(scope="module")
def params():
    return jax.eval_shape(lambda: random_params(SMALL, jax.random.key(0)))


def test_copies_are_found_in_a_program():
    found = large_copies(PROGRAM, 1 << 20)
    assert [(copy.name, copy.shape) for copy in found] == [
        ("copy.2", "bf16[48,1024,64]"),
        ("copy-start.3", "s8[4194304]"),
    ]
    assert [copy.nbytes for copy in found] == [48 * 1024 * 64 * 2, 4 << 20] and len(large_copies(PROGRAM, 1)) == 3


def test_a_matrix_without_a_kernel_is_found(params):
    weights = packed_leaves(params.linear)
    assert weights.keys() == {"mixer.qkvz", "mixer.out", "mlp.gate_up", "mlp.down"}
    assert weights["mlp.gate_up"].shape == (6, 512, 128)  # 6 x 8192 words of 8 codes
    assert without_kernel(PROGRAM, [weights["mlp.gate_up"]]) == []
    assert without_kernel(PROGRAM, [weights["mlp.down"]]) == ["[6, 128, 256]"]


def test_faults_of_a_program(params):
    step, state = Step.make(params, SMALL, 1, "lookup"), abstract_state(SMALL, StateConfig(1, 128))
    layer = state.recurrent
    copy = f"  %copy.9 = f32[{','.join(map(str, layer.shape[1:]))}]{{0}} copy(%a)"
    other = "  %copy.8 = f32[333,3]{0} copy(%a)"
    found = faults_of(step, params, state, large_copies(f"{copy}\n{other}", 1000), PROGRAM)
    assert len(found) == 9 and found[-1].startswith("copy.9 copies f32[1,6")  # and eight matrices


def test_random_weights_have_the_size_of_trained_ones():
    params = random_params(SMALL, jax.random.key(0))
    for weight in (params.full.mlp.down, params.embed):
        values = dequantize(weight, jnp.float32)
        assert float(jnp.std(values)) == pytest.approx(weight.shape[-1] ** -0.5, rel=0.1)
        assert abs(float(jnp.mean(values))) < 0.02 * float(jnp.std(values))
    assert params.embed.layout == "rows" and (params.embed.bits, params.lm_head.bits) == (8, 4)
    assert jax.tree.structure(jax.tree.map(lambda _: 0, abstract(SMALL))) == jax.tree.structure(
        jax.tree.map(lambda _: 0, params, is_leaf=lambda leaf: hasattr(leaf, "bits"))
    )


def test_bytes_of_a_step_of_the_full_model():
    params = jax.eval_shape(lambda: random_params(FULL, jax.random.key(0)))
    state = abstract_state(FULL, StateConfig(1, 16384))
    weights = tree_bytes((params.linear, params.full, params.norm, params.lm_head))
    states = 2 * (48 * 48 * 128 * 128 * 4 + 48 * 3 * 10240 * 2)
    assert moved_bytes(params, state, 8192, 0) == weights + 8192 * 65_536 + states
    assert 13.2e9 < weights < 13.3e9


def test_parts_add_up_to_the_step():
    parts = parts_of({"full_o": 1.0, "linear_out": 2.0, "lm_head": 0.5}, 0.005, 0.007)
    assert sum(parts.values()) == pytest.approx(7) and parts["other"] == pytest.approx(2)


@pytest.mark.slow
def test_a_small_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(full_size_step, "append", lambda record: harness.append(record, tmp_path))
    main("--scale small --rows 3 --contexts 64 --read-mib 64 --repeats 1".split())
    [record] = [json.loads(line) for line in (tmp_path / "full_size_step.jsonl").read_text().splitlines()]
    results = record["results"]
    assert record["weights"] == "random" and record["settings"]["speculate"] == "lookup"
    assert sum(results["parts_ms"].values()) == pytest.approx(record["ms_per_step"])
    assert results["faults"] is None and results["compile_seconds"] > 0
    assert "random weights" in capsys.readouterr().out
