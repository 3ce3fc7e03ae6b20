"""DFlash2 drafters: configuration, names, loading in both formats, and every fault told by name."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen38_jax.checkpoint import CheckpointError, describe, format_description, load_drafter
from qwen38_jax.checkpoint.synthetic import DRAFTERS, dflash2, hf_config, recipe, write
from qwen38_jax.config import ConfigError, DFlash2Config
from qwen38_jax.params import abstract_dflash2, tree_bytes
from qwen38_jax.quantization import QuantTensor, dequantize
from tests.checkpoint.packing import values
from tests.checkpoint.small import edit, edit_json

CFG = dflash2.SMALL


@pytest.fixture(scope="module", params=DRAFTERS)
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter") / "m"
    write(path, recipe(request.param, scale="small"))
    return path


@pytest.fixture
def dense(tmp_path):
    write(tmp_path / "m", recipe("qwen3.8-27b-dflash2", scale="small"))
    return tmp_path / "m"


def test_a_drafter_loads(directory):
    params, cfg = load_drafter(directory)
    assert cfg == CFG
    quantised = directory.parent.name and "quantization_config" in json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    infos = jax.tree_util.tree_leaves_with_path(abstract_dflash2(cfg))
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    assert {isinstance(leaf, QuantTensor) for leaf in leaves} == ({True, False} if quantised else {False})
    for (path, info), leaf in zip(infos, leaves, strict=True):
        assert leaf.shape == info.shape and leaf.dtype == info.dtype, jax.tree_util.keystr(path)
    keys = cfg.num_key_value_heads * cfg.head_dim
    for name, leaf in {
        "fc.weight": _matrix(params.fc),
        "hidden_norm.weight": params.hidden_norm,
        "norm.weight": params.norm,
        "candidate_selector.hidden_projection.weight": params.selector.projection,
        "candidate_selector.predecessor_codebook": params.selector.predecessors,
        "candidate_selector.successor_codebook": params.selector.successors,
        "layers.1.input_layernorm.weight": params.layers.input_norm[1],
        "layers.1.post_attention_layernorm.weight": params.layers.post_norm[1],
        "layers.0.attention_conv.base_kernel": params.layers.attention_conv.base[0],
        "layers.1.attention_conv.kernel_projection.weight": params.layers.attention_conv.projection[1],
        "layers.1.mlp_conv.base_kernel": params.layers.mlp_conv.base[1],
        "layers.0.mlp_conv.kernel_projection.weight": params.layers.mlp_conv.projection[0],
        "layers.1.self_attn.q_norm.weight": params.layers.attention.q_norm[1],
        "layers.1.self_attn.k_norm.weight": params.layers.attention.k_norm[1],
        "layers.1.self_attn.q_proj.weight": _layer(params.layers.attention.q, 1),
        "layers.1.self_attn.k_proj.weight": _layer(params.layers.attention.kv, 1)[:keys],
        "layers.1.self_attn.v_proj.weight": _layer(params.layers.attention.kv, 1)[keys:],
        "layers.0.self_attn.o_proj.weight": _layer(params.layers.attention.o, 0),
        "layers.0.mlp.gate_proj.weight": _layer(params.layers.mlp.gate_up, 0)[: cfg.intermediate_size],
        "layers.0.mlp.up_proj.weight": _layer(params.layers.mlp.gate_up, 0)[cfg.intermediate_size :],
        "layers.1.mlp.down_proj.weight": _layer(params.layers.mlp.down, 1),
    }.items():
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), _stored(tensors, name), err_msg=name)


def _layer(leaf, i):
    return _matrix(jax.tree.map(lambda t: t[i], leaf))


def _matrix(leaf):
    return np.asarray(dequantize(leaf, "float32") if isinstance(leaf, QuantTensor) else leaf, np.float32)


def _stored(tensors, name):
    """A weight in fp32, unpacked value by value where it is packed."""
    if name in tensors:
        return tensors[name].astype(np.float32)
    codes = values(tensors[f"{name}_packed"], 4, 1) - 8
    scales = np.repeat(tensors[f"{name}_scale"].astype(np.float32), 128, axis=1)
    return codes.astype(np.float32) * scales


def test_bytes_are_told_beforehand(directory):
    from qwen38_jax.checkpoint.drafter import drafter_account

    for dtype in ("bfloat16", "float32"):
        params, cfg = load_drafter(directory, dtype=dtype)
        assert cfg.dtype == dtype and params.norm.dtype == dtype
        assert drafter_account(directory, dtype=dtype).nbytes == tree_bytes(params)


@pytest.mark.parametrize("like", DRAFTERS)
def test_the_full_configuration(like):
    config = hf_config(recipe(like))
    assert DFlash2Config.from_hf(config) == dflash2.FULL
    assert config["is_causal"] is False and config["dflash_config"]["target_layer_ids"] == [5, 19, 33, 47, 61]
    assert ("quantization_config" in config) == like.endswith("w4a16")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.pop("is_causal"), "is_causal = None"),
        (lambda c: c.update(is_causal=True), "is_causal = True"),
        (lambda c: c.pop("sliding_window"), "lacks 'sliding_window'"),
        (lambda c: c.pop("dflash_config"), "'dflash_config'"),
        (lambda c: c["dflash_config"].pop("selector_rank"), "'selector_rank'"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "lacks 'mask_token_id'"),
        (lambda c: c["dflash_config"].update(mask_token_id=512), "mask_token_id 512"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 8]), r"\[1, 8\]"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 1]), r"\[1, 1\]"),
        (lambda c: c["dflash_config"].update(block_size=1), "block_size"),
        (lambda c: c["dflash_config"].update(selector_top_k=None), "selector_top_k"),
        (lambda c: c["dflash_config"].update(selector_top_k=513), "selector_top_k = 513"),
        (lambda c: c["dflash_config"].update(selector_rank=0), "selector_rank must be a positive"),
        (lambda c: c["dflash_config"].update(conv_group_size=48), "conv_group_size = 48"),
        (lambda c: c["dflash_config"].update(sample_from_anchor=True), "sample_from_anchor"),
        (lambda c: c.update(output_multiplier=0.5), "output_multiplier = 0.5"),
        (lambda c: c.update(layer_types=["full_attention"]), "layer_types"),
        (lambda c: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1}), "rope_type"),
        (lambda c: c.update(num_key_value_heads=3), "3 key-value heads"),
        (lambda c: c.update(dtype="int8"), "int8"),
        (lambda c: c.update(hidden_size="128"), "hidden_size must be a positive integer"),
    ],
)
def test_faults_of_config_are_told(change, words):
    config = json.loads(json.dumps(dflash2.SMALL.to_hf()))
    change(config)
    with pytest.raises(ConfigError, match=words):
        DFlash2Config.from_hf(config)


def test_older_spellings_are_read():
    config = dflash2.SMALL.to_hf()
    del config["is_causal"], config["dtype"], config["layer_types"]
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": "torch.bfloat16"}
    config["dflash_config"] |= {"causal": False}
    assert DFlash2Config.from_hf(config) == dflash2.SMALL


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("layers.1.mlp_conv.base_kernel"), "lacks tensor 'layers.1.mlp_conv.base_kernel'"),
        (lambda t: t.update(extra=t["norm.weight"]), "'extra' is not part of the drafter"),
        (lambda t: t.update({"lm_head.weight": t["fc.weight"]}), "'lm_head.weight' is not part of the drafter"),
        (
            lambda t: t.update({"candidate_selector.successor_codebook": t["fc.weight"]}),
            r"successor_codebook' has shape \[128, 640\], but config.json makes it \[512, 32\]",
        ),
        (lambda t: t.update({"norm.weight": t["norm.weight"].view(np.int16)}), "'norm.weight' has dtype I16"),
        (lambda t: t.update({"fc.weight": np.pad(t["fc.weight"], ((0, 0), (0, 128)))}), r"\[128, 768\].*\[128, 640\]"),
    ],
)
def test_faults_of_tensors_are_told(dense, change, words):
    edit(dense, change)
    with pytest.raises(CheckpointError, match=words):
        load_drafter(dense)


def test_a_drafter_of_other_sizes_is_told(dense):
    edit_json(dense, lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="'layers.1.input_layernorm.weight' is not part of the drafter"):
        load_drafter(dense)
    edit_json(dense, lambda config: config.pop("dflash_config"))
    with pytest.raises(CheckpointError, match="config.json: .*'dflash_config'"):
        load_drafter(dense)
    with pytest.raises(CheckpointError, match="nowhere"):
        load_drafter(dense / "nowhere")


def test_values_are_of_a_realistic_size(dense):
    params, _ = load_drafter(dense, dtype="float32")
    assert abs(np.asarray(params.norm).mean() - 1) < 0.05 and np.asarray(params.layers.attention.q_norm).min() > 0.7
    scores = np.asarray(params.selector.predecessors) @ np.asarray(params.selector.successors).T
    assert 0.8 < scores.std() < 1.2
    assert 0.3 < np.asarray(params.layers.mlp_conv.base).min() < np.asarray(params.layers.mlp_conv.base).max() < 0.8


def test_a_drafter_is_described(directory, dense):
    d = describe(directory)
    quantised = "quantization_config" in json.loads((directory / "config.json").read_text())
    assert d.loadable and d.kind == "DFlash2 drafter" and d.config["target_layer_ids"] == CFG.target_layer_ids
    assert bool(d.quantised) == quantised and json.dumps(dataclasses.asdict(d))
    tensors = {part.name: part.tensors for part in d.classes}
    assert tensors["selector"] == 3 and tensors["convolutions"] == 2 * 4 and tensors["norms"] == 2 + 2 * 4
    formats = {part.name: part.formats for part in d.classes}
    assert sum(formats["mlp"].values()) == 2 * 3 and sum(formats["attention"].values()) == 2 * 4
    text = format_description(d)
    assert "DFlash2 drafter of 2 layers" in text and "reads layers 1, 2, 4, 5, 6" in text and "tokenizer" not in text
    assert text.endswith("can be loaded")
    edit(dense, lambda tensors: tensors.update(extra=tensors.pop("norm.weight")))
    d = describe(dense)
    assert (d.missing, d.unexpected, d.loadable) == (("norm.weight",), ("extra",), False)
    edit_json(dense, lambda config: config.pop("is_causal"))
    d = describe(dense)
    assert d.config is None and "is_causal" in d.problems[0] and "no usable config.json" in format_description(d)


@pytest.mark.parametrize("part", ["conv", "selector"])
def test_a_drafter_without_a_part(dense, part):
    """Its tensors are surplus then; a directory without them loads."""
    key = {"conv": "conv_kernel_size", "selector": "selector_rank"}[part]
    edit_json(dense, lambda config: config["dflash_config"].update({key: None}))
    with pytest.raises(CheckpointError, match=f"{part}.*is not part of the drafter"):
        load_drafter(dense)
    edit(dense, lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name])
    params, cfg = load_drafter(dense)
    assert getattr(cfg, key) is None and DFlash2Config.from_hf(cfg.to_hf()) == cfg
    assert (params.selector is None) == (part == "selector")
    assert (params.layers.mlp_conv is None) == (part == "conv")


def test_scales_that_fit_nothing_are_told(tmp_path):
    small = recipe("qwen3.8-27b-dflash2-w4a16", scale="small")
    write(tmp_path / "m", dataclasses.replace(small, cfg=dataclasses.replace(CFG, num_hidden_layers=1)))
    edit(tmp_path / "m", lambda t: t["fc.weight_scale"].fill(np.nan))
    with pytest.raises(CheckpointError, match="'fc.weight_scale' holds nan"):
        load_drafter(tmp_path / "m")
