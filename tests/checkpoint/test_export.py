import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from qwen38_jax.checkpoint import CheckpointError, export_checkpoint, load_checkpoint, write
from qwen38_jax.checkpoint.files import INDEX
from qwen38_jax.checkpoint.names import TRUNK_PREFIXES
from tests.checkpoint.small import CFG, assert_same, edit, edit_json, make, read
from tests.golden import GOLDEN, needs_golden


@pytest.mark.parametrize("prefix", TRUNK_PREFIXES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_export_load_is_bit_identical(tmp_path, dtype, prefix):
    first = load_checkpoint(make(tmp_path / "a", dtype=dtype))
    export_checkpoint(tmp_path / "b", first.params, first.cfg, prefix=prefix, shard_bytes=20_000)
    second = load_checkpoint(tmp_path / "b")
    assert second.prefix == prefix
    assert second.cfg == first.cfg
    assert_same(second.params, first.params)


@needs_golden
@pytest.mark.parametrize(
    "directory, prefix",
    [
        ("tiny_qwen3_5", "model."),
        ("tiny_qwen3_5_composite", "model.language_model."),
        ("realdims_qwen3_5", "model."),
    ],
)
def test_a_golden_directory_comes_back_tensor_for_tensor(tmp_path, directory, prefix):
    checkpoint = load_checkpoint(GOLDEN / directory)
    export_checkpoint(
        tmp_path / "out",
        checkpoint.params,
        checkpoint.cfg,
        hf_config=checkpoint.hf_config,
        generation_config=checkpoint.generation_config,
        prefix=checkpoint.prefix,
    )
    assert checkpoint.prefix == prefix
    got, want = read(tmp_path / "out"), read(GOLDEN / directory)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name, strict=True)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads((GOLDEN / directory / file).read_text())


def test_one_layer_keeps_its_numbers_across_the_stacking(tmp_path):
    """Layers 0..2 and 4..6 are stacked together, 3 and 7 apart; each must come back under its own number."""
    path = make(tmp_path / "a", num_hidden_layers=8)
    checkpoint = load_checkpoint(path)
    export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg)
    got, want = read(tmp_path / "b"), read(path)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name, strict=True)


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_fp32_leaves_are_written_narrow_only_without_loss(tmp_path, name):
    path = make(tmp_path / "a", dtype="bfloat16")
    full = f"model.layers.1.linear_attn.{name}"
    edit(path, lambda tensors: tensors.update({full: tensors[full].astype(np.float32) + np.float32(1e-4)}))
    checkpoint = load_checkpoint(path)
    export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg)
    written = read(tmp_path / "b")
    other = {"A_log": "dt_bias", "dt_bias": "A_log"}[name]
    assert written[full].dtype == np.float32
    assert written[f"model.layers.1.linear_attn.{other}"].dtype.name == "bfloat16"
    assert_same(load_checkpoint(tmp_path / "b").params, checkpoint.params)


@pytest.mark.parametrize("value", [1e-9, 1e6])
def test_what_fp16_cannot_hold_is_written_in_fp32(tmp_path, value):
    checkpoint = load_checkpoint(make(tmp_path / "a", dtype="float16"))
    mixer = checkpoint.params.linear.mixer
    mixer = mixer.replace(dt_bias=mixer.dt_bias.at[0, 0].set(value))
    params = checkpoint.params.replace(linear=checkpoint.params.linear.replace(mixer=mixer))
    export_checkpoint(tmp_path / "b", params, checkpoint.cfg)
    assert_same(load_checkpoint(tmp_path / "b").params, params)


def test_shards_index_and_metadata(tmp_path):
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    export_checkpoint(tmp_path / "one", checkpoint.params, checkpoint.cfg)
    assert not (tmp_path / "one" / INDEX).exists()
    export_checkpoint(tmp_path / "many", checkpoint.params, checkpoint.cfg, shard_bytes=25_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    tensors = read(tmp_path / "many")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for file in files:
        with safe_open(tmp_path / "many" / file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {name for name, where in index["weight_map"].items() if where == file} == set(opened.keys())
            sizes = [opened.get_slice(name) for name in opened.keys()]
            assert len(sizes) == 1 or sum(4 * int(np.prod(s.get_shape())) for s in sizes) <= 25_000


def test_every_tensor_is_aligned_to_its_item_size(tmp_path):
    cfg = dataclasses.replace(CFG, dtype="bfloat16", linear_value_head_dim=9)  # odd numbers of bf16 values
    checkpoint = load_checkpoint(make(tmp_path / "a", **dataclasses.asdict(cfg)))
    mixer = checkpoint.params.linear.mixer
    params = checkpoint.params.replace(
        linear=checkpoint.params.linear.replace(mixer=mixer.replace(A_log=mixer.A_log + 1e-4))
    )
    export_checkpoint(tmp_path / "b", params, checkpoint.cfg)
    raw = (tmp_path / "b" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    assert {entry["dtype"] for entry in header.values()} == {"F32", "BF16"} and length % 8 == 0
    for entry in header.values():
        assert entry["data_offsets"][0] % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0


def test_tied_and_headless_models_round_trip(tmp_path):
    path = make(tmp_path / "a")
    edit_json(path, lambda config: config.update(tie_word_embeddings=True))
    edit(path, lambda t: [t.pop(name) for name in list(t) if name.startswith(("mtp.", "lm_head."))])
    checkpoint = load_checkpoint(path)
    export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg)
    again = load_checkpoint(tmp_path / "b")
    assert again.notes == () and again.cfg == checkpoint.cfg
    assert_same(again.params, checkpoint.params)


def test_the_written_config_follows_what_was_loaded(tmp_path):
    path = make(tmp_path / "a", prefix="model.language_model.")
    edit(path, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    checkpoint = load_checkpoint(path, dtype="bfloat16")
    checkpoint.hf_config["quantization_config"] = {"quant_method": "gptq"}
    export_checkpoint(
        tmp_path / "b",
        checkpoint.params,
        checkpoint.cfg,
        hf_config=checkpoint.hf_config,
        generation_config={"temperature": 0.5, "eos_token_id": 3},
        prefix="model.language_model.",
    )
    again = load_checkpoint(tmp_path / "b")
    assert again.cfg == checkpoint.cfg and again.cfg.dtype == "bfloat16"
    assert again.hf_config["text_config"]["mtp_num_hidden_layers"] == 0
    assert "quantization_config" not in again.hf_config and "quantization_config" in checkpoint.hf_config
    assert again.generation_config == {"temperature": 0.5, "eos_token_id": list(checkpoint.cfg.eos_token_ids)}


def test_tokenizer_files_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg, copy_from=source)
    assert not (tmp_path / "b").exists()
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (source / name).write_text(name)
    export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg, copy_from=source)
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "b" / "chat_template.jinja").exists() and not (tmp_path / "b" / "README.md").exists()


def test_a_used_directory_is_refused_and_an_empty_one_taken(tmp_path):
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    before = (tmp_path / "a" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="not an empty directory"):
        export_checkpoint(tmp_path / "a", checkpoint.params, checkpoint.cfg)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before
    (tmp_path / "b").mkdir()
    export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg)
    load_checkpoint(tmp_path / "b")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch, error):
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    real = write.write_json

    def fail_at_the_end(path, value):
        if path.name == "generation_config.json":
            raise error
        real(path, value)

    monkeypatch.setattr("qwen38_jax.checkpoint.export.write_json", fail_at_the_end)
    with pytest.raises(error):
        export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_contradictions_are_errors_that_write_nothing(tmp_path):
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    params, cfg = checkpoint.params, checkpoint.cfg
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="prefix 'transformer.' is unknown"):
        export_checkpoint(out, params, cfg, prefix="transformer.")
    with pytest.raises(ValueError, match="shard_bytes"):
        export_checkpoint(out, params, cfg, shard_bytes=0)
    with pytest.raises(ValueError, match=r"params\.embed is float16"):
        export_checkpoint(out, params.replace(embed=params.embed.astype(jnp.float16)), cfg)
    with pytest.raises(ValueError, match=r"params\.norm is float32\[15\]"):
        export_checkpoint(out, params.replace(norm=params.norm[1:]), cfg)
    with pytest.raises(ValueError, match="differ in the leaves mtp.embedding_norm"):
        export_checkpoint(out, params.replace(mtp=None), cfg)
    hf_config = {**cfg.to_hf(), "rms_norm_eps": 1e-5}
    with pytest.raises(ValueError, match=r"another model.*rms_norm_eps \(1e-05, not 1e-06\)"):
        export_checkpoint(out, params, cfg, hf_config=hf_config)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_refused_with_both_numbers(tmp_path, monkeypatch):
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: write.shutil._ntuple_diskusage(10, 5, 5_000))
    with pytest.raises(CheckpointError, match=r"need 83,\d\d\d bytes.* 5,000 free"):
        export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg)
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_transformers_loads_an_export(tmp_path):
    """The port's names, shapes and config are the reference's: no key is missing, none is left over."""
    torch = pytest.importorskip("torch", reason="the parity extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    export_checkpoint(tmp_path / "b", checkpoint.params, checkpoint.cfg, shard_bytes=25_000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    state = model.state_dict()
    for name, value in read(tmp_path / "b").items():
        if not name.startswith("mtp."):
            np.testing.assert_array_equal(state[name].numpy(), value, err_msg=name)
    logits = model(input_ids=torch.arange(CFG.vocab_size)[None]).logits
    assert torch.isfinite(logits).all() and 0.3 < logits.std() < 3  # random weights of a realistic size


def test_params_on_any_backend_are_plain_arrays(tmp_path):
    """Numpy leaves, as a converter may hold them, export like jax arrays."""
    checkpoint = load_checkpoint(make(tmp_path / "a"))
    export_checkpoint(tmp_path / "b", jax.tree.map(np.asarray, checkpoint.params), checkpoint.cfg)
    assert_same(load_checkpoint(tmp_path / "b").params, checkpoint.params)
