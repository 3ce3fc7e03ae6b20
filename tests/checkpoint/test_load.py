import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qwen38_jax.checkpoint import files, load, load_checkpoint, names, unpack
from qwen38_jax.checkpoint.synthetic import recipe, write
from qwen38_jax.config import ConfigError
from qwen38_jax.params import abstract
from tests.checkpoint.small import assert_same, edit, edit_json, make, read
from tests.golden import GOLDEN, needs_golden

# Rows of the fused matrices, as the model's equations count them.
_LAYER = {
    "input_layernorm.weight": lambda layer: layer.input_norm,
    "post_attention_layernorm.weight": lambda layer: layer.post_norm,
    "mlp.gate_proj.weight": lambda layer: _halves(layer.mlp.gate_up)[0],
    "mlp.up_proj.weight": lambda layer: _halves(layer.mlp.gate_up)[1],
    "mlp.down_proj.weight": lambda layer: layer.mlp.down,
}
_ATTENTION = {
    "self_attn.q_proj.weight": lambda layer: layer.mixer.qkv[..., : 2 * layer.mixer.o.shape[-1], :],
    "self_attn.k_proj.weight": lambda layer: _halves(layer.mixer.qkv[..., 2 * layer.mixer.o.shape[-1] :, :])[0],
    "self_attn.v_proj.weight": lambda layer: _halves(layer.mixer.qkv[..., 2 * layer.mixer.o.shape[-1] :, :])[1],
    "self_attn.o_proj.weight": lambda layer: layer.mixer.o,
    "self_attn.q_norm.weight": lambda layer: layer.mixer.q_norm,
    "self_attn.k_norm.weight": lambda layer: layer.mixer.k_norm,
    **_LAYER,
}
_LINEAR = {
    "linear_attn.in_proj_qkv.weight": lambda layer: layer.mixer.qkvz[..., : layer.mixer.conv.shape[-2], :],
    "linear_attn.in_proj_z.weight": lambda layer: layer.mixer.qkvz[..., layer.mixer.conv.shape[-2] :, :],
    "linear_attn.in_proj_b.weight": lambda layer: _halves(layer.mixer.ba)[0],
    "linear_attn.in_proj_a.weight": lambda layer: _halves(layer.mixer.ba)[1],
    "linear_attn.conv1d.weight": lambda layer: layer.mixer.conv[:, :, None, :],
    "linear_attn.A_log": lambda layer: layer.mixer.A_log,
    "linear_attn.dt_bias": lambda layer: layer.mixer.dt_bias,
    "linear_attn.norm.weight": lambda layer: layer.mixer.norm,
    "linear_attn.out_proj.weight": lambda layer: layer.mixer.out,
    **_LAYER,
}


def _halves(rows):
    return np.split(rows, 2, axis=-2)


def _by_hf_name(params, num_layers, prefix):
    """The map from parameters to names written a second time, so that a swap in the first is seen."""
    named = {
        f"{prefix}embed_tokens.weight": params.embed,
        f"{prefix}norm.weight": params.norm,
        "lm_head.weight": params.lm_head,
    }
    for n in range(num_layers):
        if n % 4 == 3:
            named |= {f"{prefix}layers.{n}.{k}": get(params.full)[n // 4] for k, get in _ATTENTION.items()}
        else:
            layer = 3 * (n // 4) + n % 4
            named |= {f"{prefix}layers.{n}.{k}": get(params.linear)[layer] for k, get in _LINEAR.items()}
    if params.mtp is not None:
        named |= {f"mtp.layers.0.{k}": get(params.mtp.layer) for k, get in _ATTENTION.items()}
        named["mtp.pre_fc_norm_embedding.weight"] = params.mtp.embedding_norm
        named["mtp.pre_fc_norm_hidden.weight"] = params.mtp.hidden_norm
        named["mtp.fc.weight"] = params.mtp.fc
        named["mtp.norm.weight"] = params.mtp.norm
    return named


@needs_golden
@pytest.mark.parametrize(
    "directory, prefix, mtp",
    [
        ("tiny_qwen3_5", "model.", 1),
        ("tiny_qwen3_5_composite", "model.language_model.", 1),
        ("realdims_qwen3_5", "model.", 0),
    ],
)
def test_golden_directories_load_bit_exactly(directory, prefix, mtp):
    checkpoint = load_checkpoint(GOLDEN / directory)
    assert (checkpoint.prefix, checkpoint.cfg.mtp_num_hidden_layers, checkpoint.notes) == (prefix, mtp, ())
    assert checkpoint.path == GOLDEN / directory
    params = jax.tree.map(np.asarray, checkpoint.params)
    named = _by_hf_name(params, checkpoint.cfg.num_hidden_layers, prefix)
    stored = load_file(GOLDEN / directory / "model.safetensors")
    assert named.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(named[name], value, err_msg=name)


@needs_golden
def test_both_golden_spellings_are_one_model():
    assert_same(
        load_checkpoint(GOLDEN / "tiny_qwen3_5_composite").params, load_checkpoint(GOLDEN / "tiny_qwen3_5").params
    )


def test_leaves_are_as_abstract_says(tmp_path):
    for dtype in ("float32", "bfloat16", "float16"):
        checkpoint = load_checkpoint(make(tmp_path / dtype, dtype=dtype))
        want = jax.tree.map(lambda info: (info.shape, info.dtype), abstract(checkpoint.cfg))
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), checkpoint.params) == want
        assert checkpoint.params.linear.mixer.A_log.dtype == jnp.float32


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_dtype_casts_each_value_once(tmp_path, stored, asked):
    path = make(tmp_path / "m", dtype=stored)
    checkpoint = load_checkpoint(path, dtype=asked)
    assert checkpoint.cfg.dtype == asked
    tensors = read(path)
    up = tensors["model.layers.2.mlp.up_proj.weight"]
    assert up.dtype.name == stored
    np.testing.assert_array_equal(_halves(checkpoint.params.linear.mlp.gate_up)[1][2], up.astype(asked))
    decay = tensors["model.layers.2.linear_attn.A_log"]
    np.testing.assert_array_equal(checkpoint.params.linear.mixer.A_log[2], decay.astype("float32"))


def test_an_unknown_dtype_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="int8"):
        load_checkpoint(make(tmp_path / "m"), dtype="int8")


def _rename(tensors, prefix, head, mtp):
    spelled = {}
    for name, value in tensors.items():
        if name.startswith("model."):
            name = prefix + name.removeprefix("model.")
        elif name == "lm_head.weight":
            name = head
        elif name.startswith("mtp."):
            name = mtp + name.removeprefix("mtp.")
        spelled[name] = value
    assert len(spelled) == len(tensors)
    return spelled


@pytest.mark.parametrize(
    "prefix, head, mtp",
    [
        ("model.language_model.", "lm_head.weight", "mtp."),
        ("model.language_model.", "model.language_model.lm_head.weight", "model.mtp."),
        ("language_model.model.", "language_model.lm_head.weight", "language_model.mtp."),
        ("language_model.model.", "language_model.model.lm_head.weight", "mtp."),
        ("model.", "model.lm_head.weight", "model.mtp."),
        ("", "lm_head.weight", "mtp."),
    ],
)
def test_every_spelling_gives_the_same_parameters(tmp_path, prefix, head, mtp):
    reference = make(tmp_path / "reference", shards=True)
    spelled = tmp_path / "spelled"
    spelled.mkdir()
    (spelled / "config.json").write_bytes((reference / "config.json").read_bytes())
    save_file(_rename(read(reference), prefix, head, mtp), spelled / "model.safetensors")
    checkpoint = load_checkpoint(spelled)
    assert checkpoint.prefix == prefix
    assert_same(checkpoint.params, load_checkpoint(reference).params)


def test_the_multimodal_config_does_not_decide_the_prefix(tmp_path):
    path = make(tmp_path / "m", prefix="model.language_model.")
    text_only = make(tmp_path / "t")
    (path / "config.json").write_bytes((text_only / "config.json").read_bytes())
    assert load_checkpoint(path).prefix == "model.language_model."


def test_vision_tensors_are_never_read(tmp_path, monkeypatch):
    path = make(tmp_path / "m", prefix="model.language_model.", vision=(1, 16, 32))
    vision = ("visual.blocks.0.x", "vision_tower.x", "model.vision_tower.x", "multi_modal_projector.x")
    edit(path, lambda tensors: tensors.update({name: np.zeros(3, np.int8) for name in vision}))
    assert sum("visual" in name for name in read(path)) > 10
    requested = []
    real = files._read

    def spy(tensor, where):
        requested.append(tensor.name)
        return real(tensor, where)

    monkeypatch.setattr(files, "_read", spy)
    load_checkpoint(path)
    assert set(requested) == {name for name in read(path) if names.parse(name).kind != "vision"}


def test_a_huge_vision_shard_costs_nothing(tmp_path):
    path = make(tmp_path / "m", prefix="model.language_model.")
    size = 1 << 36  # 64 GB of hole: reading it would end the process
    span = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    header = json.dumps({"model.visual.patch_embed.proj.weight": span}).encode()
    with open(path / "vision.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
    load_checkpoint(path)


@pytest.mark.parametrize("announced", [0, 1])
def test_the_trunk_is_the_same_with_and_without_mtp(tmp_path, announced):
    path = make(tmp_path / "m", mtp_num_hidden_layers=1)
    whole = load_checkpoint(path)
    edit_json(path, lambda config: config.update(mtp_num_hidden_layers=announced))
    assert load_checkpoint(path).cfg.mtp_num_hidden_layers == 1

    edit(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")])
    trunk = load_checkpoint(path)
    assert whole.params.mtp is not None and trunk.params.mtp is None
    assert trunk.cfg.mtp_num_hidden_layers == 0
    assert_same(trunk.params, whole.params.replace(mtp=None))
    assert any("mtp" in note for note in trunk.notes) == bool(announced)


def _drop_head(tensors):
    tensors.pop("lm_head.weight")


def _copy_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("level", ["root", "text"])
def test_tied_models_need_no_head(tmp_path, prefix, level):
    path = make(tmp_path / "m", prefix=prefix)

    def tie(config):
        text = config.get("text_config", config)
        for part in (config, text):
            part.pop("tie_word_embeddings", None)
        (config if level == "root" else text)["tie_word_embeddings"] = True

    edit_json(path, tie)
    edit(path, _drop_head)
    checkpoint = load_checkpoint(path)
    assert checkpoint.cfg.tie_word_embeddings and checkpoint.params.lm_head is None


def test_a_tied_model_may_carry_its_embedding_twice(tmp_path):
    path = make(tmp_path / "m")
    edit_json(path, lambda config: config.update(tie_word_embeddings=True))
    edit(path, _copy_head)
    assert load_checkpoint(path).params.lm_head is None


@pytest.mark.parametrize(
    "generation, want",
    [
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [9, 7]}, (9, 7)),
        ({"eos_token_id": None}, (5,)),
        ({}, (5,)),
        (None, (5,)),
    ],
)
def test_generation_config_decides_the_stop_ids(tmp_path, generation, want):
    path = make(tmp_path / "m", eos_token_ids=(5,))
    (path / "generation_config.json").unlink()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = load_checkpoint(path)
    assert checkpoint.cfg.eos_token_ids == want
    assert checkpoint.generation_config == (generation or {})


@pytest.mark.parametrize("name", ["dflash-mtp-int8", "w4a16-visual-model.language_model", "m"])
def test_the_directory_name_decides_nothing(tmp_path, name):
    path = make(tmp_path / name)
    assert_same(load_checkpoint(path).params, load_checkpoint(make(tmp_path / "plain")).params)


def test_shards_and_one_file_hold_the_same_model(tmp_path):
    sharded = make(tmp_path / "shards", shards=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    want = load_checkpoint(make(tmp_path / "one")).params
    assert_same(load_checkpoint(sharded).params, want)
    (sharded / "model.safetensors.index.json").unlink()  # shards speak for themselves
    assert_same(load_checkpoint(sharded).params, want)


def test_files_outside_the_index_are_noted_and_ignored(tmp_path):
    path = make(tmp_path / "m", shards=True)
    save_file({"other": np.zeros(2, np.float32)}, path / "other.safetensors")
    checkpoint = load_checkpoint(path)
    assert len(checkpoint.notes) == 1 and "other.safetensors" in checkpoint.notes[0]


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 5000])
def test_reading_in_chunks_changes_nothing(tmp_path, monkeypatch, chunk_bytes):
    path = make(tmp_path / "m", dtype="bfloat16")
    want = load_checkpoint(path).params
    monkeypatch.setattr(unpack, "CHUNK_BYTES", chunk_bytes)
    assert_same(load_checkpoint(path).params, want)


@pytest.mark.parametrize("like", ["qwen3.8-27b", "qwen3.8-27b-w4a16"])
def test_filling_on_the_device_equals_filling_on_the_host(tmp_path, monkeypatch, like):
    path = tmp_path / "m"
    write(path, recipe(like, scale="small", layers=4, vision=False))
    want = load_checkpoint(path).params
    monkeypatch.setattr(unpack, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(load, "_fill_host", load._fill_device)
    assert_same(load_checkpoint(path).params, want)


@pytest.mark.parametrize("rows", [1, 7, 8, 100])
def test_row_chunks_cover_every_row_with_one_length(monkeypatch, rows):
    monkeypatch.setattr(unpack, "CHUNK_BYTES", 4 * 16 * 7)
    chunks = list(unpack.row_chunks((rows, 16)))
    assert {row for start, stop in chunks for row in range(start, stop)} == set(range(rows))
    assert {stop - start for start, stop in chunks} == {min(rows, 7)}
