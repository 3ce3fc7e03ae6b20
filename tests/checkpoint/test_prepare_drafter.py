"""A DFlash2 drafter that is prepared with its target."""

import json

import jax
import numpy as np
import pytest

from qwen38_jax.checkpoint import CheckpointError, describe, load_checkpoint, load_drafter
from qwen38_jax.checkpoint.prepare import Options, plan_preparation
from qwen38_jax.checkpoint.synthetic import DRAFTERS, recipe, write
from qwen38_jax.config import ConfigError
from qwen38_jax.quantization import LAYOUTS, Layout, QuantTensor, quantize
from tests.checkpoint.small import assert_same, edit, make
from tests.checkpoint.test_prepare import as_dense, contents, prepare


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("target") / "m", dtype="bfloat16")


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """The directories of a drafter in bf16 and of one in int4."""
    paths = [tmp_path_factory.mktemp("drafter") / name for name in DRAFTERS]
    for path in paths:
        write(path, recipe(path.name, scale="small"))
    return paths


def options(drafter, linears=None, **changes):
    return Options(head="keep", embedding="keep", mtp="keep", drafter=drafter, drafter_linears=linears, **changes)


@jax.jit
def rounded(params, bits=8):
    """What is asked for, leaf by leaf; rows of this model are of one group or two."""
    attention, mlp = params.layers.attention, params.layers.mlp
    attention = attention.replace(**{name: quantize(getattr(attention, name), 8, 128) for name in ("q", "kv", "o")})
    mlp = mlp.replace(gate_up=quantize(mlp.gate_up, 8, 128), down=quantize(mlp.down, 8, 128))
    return params.replace(fc=quantize(params.fc, 8, 128), layers=params.layers.replace(attention=attention, mlp=mlp))


def test_linears_are_rounded_and_all_else_is_kept(target, drafters, tmp_path):
    before = contents(drafters[0])
    manifest = prepare(target, tmp_path / "m", options(drafters[0]))
    assert contents(drafters[0]) == before
    (got, cfg), (dense, source_cfg) = load_drafter(tmp_path / "m" / "drafter"), load_drafter(drafters[0])
    assert cfg == source_cfg
    assert_same(got, rounded(dense))
    assert_same(load_checkpoint(tmp_path / "m").params, load_checkpoint(target).params)
    assert "unknown" not in {part.name for part in describe(tmp_path / "m" / "drafter").classes}
    records = {name: r for name, r in manifest["tensors"].items() if name.startswith("drafter: ")}
    assert {f"drafter/{name}" for name in before if "generation" not in name} <= manifest["sources"].keys()
    for name, record in records.items():
        linear = "_proj.weight" in name or name == "drafter: fc.weight"
        assert record["is"] == ("int8 group 128 (mma)" if linear else "bf16"), name
        assert (1e-3 < record["relative_rms_error"] < 2e-2) == linear
    assert records["drafter: layers.1.self_attn.v_proj.weight"]["stored_as"] == "layers.1.attention.kv"
    index = json.loads((tmp_path / "m" / "drafter" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["layers.1.attention.kv.codes"] == "layers-001.safetensors"


@pytest.mark.parametrize("which", [0, 1])
def test_keeping_changes_nothing(target, drafters, tmp_path, which):
    prepare(target, tmp_path / "m", options(drafters[which], "keep"))
    assert_same(load_drafter(tmp_path / "m" / "drafter")[0], load_drafter(drafters[which])[0])


def test_a_drafter_in_integers_is_kept_unless_other_ones_are_asked_for(target, drafters, tmp_path):
    for linears in (None, "int4"):
        prepare(target, tmp_path / str(linears), options(drafters[1], linears))
        assert_same(load_drafter(tmp_path / str(linears) / "drafter")[0], load_drafter(drafters[1])[0])
    with pytest.raises(CheckpointError, match="drafter_linears is to be int8, but the source has fc in int4"):
        plan_preparation(target, options(drafters[1], "int8"))


def test_it_comes_along_when_its_target_is_prepared_again(target, drafters, tmp_path):
    prepare(target, tmp_path / "a", options(drafters[0], "int4"))
    prepare(tmp_path / "a", tmp_path / "b", Options())
    assert contents(tmp_path / "a" / "drafter") == contents(tmp_path / "b" / "drafter")


def test_it_takes_the_layout_that_is_asked_for(target, drafters, tmp_path, monkeypatch):
    flipped = Layout(
        lambda w: w.replace(codes=w.codes[..., ::-1, :], layout="flipped"),
        lambda w: w.replace(codes=w.codes[..., ::-1, :], layout="rows"),
    )
    monkeypatch.setitem(LAYOUTS, "flipped", flipped)
    prepare(target, tmp_path / "a", options(drafters[0], layout="flipped"))
    prepare(target, tmp_path / "b", options(drafters[0]))
    a, b = (load_drafter(tmp_path / name / "drafter")[0] for name in "ab")
    leaves = jax.tree.leaves(a, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    assert {leaf.layout for leaf in leaves if isinstance(leaf, QuantTensor)} == {"flipped"}
    jax.tree.map(np.testing.assert_array_equal, as_dense(a), as_dense(b))


def test_what_is_no_drafter_is_refused(target, tmp_path):
    with pytest.raises((CheckpointError, ConfigError), match="dflash_config"):
        plan_preparation(target, options(target))
    write(tmp_path / "d", recipe(DRAFTERS[0], scale="small"))
    edit(tmp_path / "d", lambda t: t.pop("layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks tensor 'layers\.1\.mlp\.up_proj\.weight'"):
        plan_preparation(target, options(tmp_path / "d"))
