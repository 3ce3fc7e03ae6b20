import dataclasses
import json

import pytest

from qwen38_jax.checkpoint import CheckpointError, describe, format_description
from qwen38_jax.checkpoint.inspect import Description
from qwen38_jax.checkpoint.synthetic import recipe, write
from tests.checkpoint.small import edit, make, read


@pytest.fixture(autouse=True)
def _no_tensor_is_read(monkeypatch):
    def refuse(*_):
        raise AssertionError("inspecting must not read tensor data")

    monkeypatch.setattr("qwen38_jax.checkpoint.files._read", refuse)


def _counts(description: Description) -> dict[str, int]:
    return {part.name: part.tensors for part in description.classes}


def test_a_sound_checkpoint(tmp_path):
    path = make(tmp_path / "m", prefix="model.language_model.", vision=(1, 16, 32), shards=True, dtype="bfloat16")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (path / name).write_text("{}")
    d = describe(path)
    assert d.loadable and d.quantised is None
    assert (d.prefix, d.mtp, d.eos_token_ids) == ("model.language_model.", "present", (1, 0))
    assert d.tokenizer and d.chat_template and d.generation_config
    assert d.config["num_hidden_layers"] == 4 and d.config["dtype"] == "bfloat16"
    assert _counts(d) == {
        "gated_delta_net": 3 * 8,
        "attention": 4,
        "mlp": 4 * 3,
        "norms": 4 * 2 + 3 + 2 + 1,  # two a layer, one a GDN, q and k, the last
        "embed": 1,
        "head": 1,
        "mtp": 15,
        "vision": 12 + 9,
    }
    tensors = read(path)
    assert sum(part.nbytes for part in d.classes) == sum(value.nbytes for value in tensors.values())
    assert all(part.dtypes == {"BF16": part.tensors} for part in d.classes)
    text = format_description(d)
    for line in ("4 layers: 1 x (3 Gated DeltaNet, 1 attention)", "stop ids          1, 0", "can be loaded"):
        assert line in text


def test_what_is_missing_and_what_is_unexpected(tmp_path):
    path = make(tmp_path / "m")

    def spoil(tensors):
        tensors["model.layers.7.extra"] = tensors.pop("model.layers.3.self_attn.k_proj.weight")
        tensors.pop("mtp.fc.weight")

    edit(path, spoil)
    (path / "generation_config.json").unlink()
    d = describe(path)
    assert not d.loadable and d.mtp == "incomplete"
    assert set(d.missing) == {"model.layers.3.self_attn.k_proj.weight", "mtp.fc.weight"}
    assert d.unexpected == ("model.layers.7.extra",)
    assert (d.tokenizer, d.chat_template, d.generation_config) == (False, False, False)
    text = format_description(d)
    assert "missing (2)" in text and "model.layers.7.extra" in text and text.endswith("cannot be loaded")


def test_without_mtp(tmp_path):
    path = make(tmp_path / "m")
    edit(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")])
    d = describe(path)
    assert d.loadable and d.mtp == "absent" and d.config["mtp_num_hidden_layers"] == 0
    assert len(d.notes) == 1


def test_a_quantised_checkpoint_is_described(tmp_path):
    write(tmp_path / "m", recipe("qwen3.8-27b-w4a16", scale="small"))
    d = describe(tmp_path / "m")
    # Scaled down, most matrices have 128 columns, which is one group.
    row, packed = "int4 per channel (compressed-tensors)", "int4 group 128 (compressed-tensors)"
    assert set(d.quantised.split(", ")) == {row, packed} and d.loadable
    assert (d.missing, d.unexpected, d.problems, d.mtp) == ((), (), (), "present")
    classes = {part.name: part for part in d.classes}
    assert classes["mlp"].dtypes == {"I32": 24, "F16": 24, "I64": 24}
    assert classes["mlp"].formats == {row: 16, packed: 8}
    assert classes["gated_delta_net"].formats == {"bf16": 6 * 5, row: 6 * 2, packed: 6}
    assert classes["mtp"].formats == {"bf16": 15}
    assert f"16 {row}, 8 {packed}" in format_description(d)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_a_broken_directory_is_described(tmp_path, broken):
    path = make(tmp_path / "m")
    (path / broken).write_bytes(b"{")
    d = describe(path)
    assert not d.loadable and broken in d.problems[0]
    assert (d.config is None) == (broken == "config.json")
    assert bool(d.classes) == (broken == "config.json")
    assert broken in format_description(d)


def test_an_embedded_chat_template_counts(tmp_path):
    path = make(tmp_path / "m")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert describe(path).chat_template


def test_json(tmp_path):
    d = describe(make(tmp_path / "m"))
    again = json.loads(json.dumps(dataclasses.asdict(d)))
    assert again["classes"][0]["name"] == "gated_delta_net" and again["config"]["vocab_size"] == 32


def test_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        describe(tmp_path / "nowhere")
