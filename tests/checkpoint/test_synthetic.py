import json

import numpy as np
import pytest

from qwen38_jax.checkpoint import CheckpointError, load_checkpoint, names
from qwen38_jax.checkpoint import write as writing
from qwen38_jax.checkpoint.files import INDEX
from qwen38_jax.checkpoint.synthetic import FULL, MODELS, Recipe, hf_config, plan, recipe, write
from qwen38_jax.checkpoint.write import NewTensor
from qwen38_jax.config import ModelConfig
from scripts.make_synthetic_checkpoint import main
from tests.checkpoint.small import make, read
from tests.golden import GOLDEN, needs_golden


def _all(files):
    return {tensor.name: tensor for tensors in files.values() for tensor in tensors}


def test_the_full_bf16_checkpoint_has_the_published_tensors():
    files = plan(recipe("qwen3.8-27b"))
    tensors = _all(files)
    assert (len(files), len(tensors)) == (18, 1199)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 55_562_855_904
    assert sum(name.startswith("model.visual.") for name in tensors) == 333
    assert {tensor.dtype for tensor in tensors.values()} == {"bfloat16"}
    prefix = "model.language_model.layers"
    for name, shape in {
        "model.language_model.embed_tokens.weight": (248320, 5120),
        "lm_head.weight": (248320, 5120),
        f"{prefix}.63.self_attn.q_proj.weight": (12288, 5120),
        f"{prefix}.62.linear_attn.in_proj_qkv.weight": (10240, 5120),
        f"{prefix}.0.linear_attn.conv1d.weight": (10240, 1, 4),
        f"{prefix}.0.linear_attn.norm.weight": (128,),
        "mtp.fc.weight": (5120, 10240),
    }.items():
        assert tensors[name].shape == shape
    assert len(_all(plan(recipe("qwen3.8-27b", vision=False)))) == 1199 - 333
    assert _all(plan(recipe("qwen3.8-27b", vocab=1024)))["lm_head.weight"].shape == (1024, 5120)


def test_the_full_w4a16_checkpoint_has_the_published_tensors():
    files = plan(recipe("qwen3.8-27b-w4a16"))
    tensors = _all(files)
    assert (len(files), len(tensors)) == (7 + 1, 1999)
    assert sum(name.endswith(".weight_packed") for name in tensors) == 400
    assert len(files["model_extra_tensors.safetensors"]) == 15
    assert "lm_head.weight" in {tensor.name for tensor in files["model-00007-of-00007.safetensors"]}
    down = "model.language_model.layers.5.mlp.down_proj.weight"
    assert {key: (t.dtype, t.shape) for key, t in tensors.items() if key.startswith(down)} == {
        f"{down}_packed": ("int32", (5120, 17408 // 8)),
        f"{down}_scale": ("float16", (5120, 17408 // 128)),
        f"{down}_shape": ("int64", (2,)),
    }
    assert tensors["model.language_model.layers.5.linear_attn.in_proj_a.weight"].dtype == "bfloat16"


def test_the_other_full_checkpoints_have_the_published_tensors():
    files = plan(recipe("qwen3.8-27b-fp8"))
    fp8 = _all(files)
    assert sum(tensor.dtype == "float8_e4m3fn" for tensor in fp8.values()) == 407
    assert sum(tensor.nbytes for tensor in fp8.values()) == pytest.approx(28.75 * 2**30, rel=1e-3)
    assert len(files) == 64 + 2 and {"layers-63.safetensors", "outside.safetensors", "mtp.safetensors"} <= files.keys()
    assert fp8["mtp.fc.weight"].dtype == "bfloat16"
    assert fp8["mtp.layers.0.mlp.down_proj.weight_scale_inv"].shape == (40, 136)
    fast = _all(plan(recipe("qwen3.8-27b-fast")))
    for name, shape in {
        "lm_head.weight_packed": (248320, 640),
        "lm_head.weight_scale": (248320, 40),
        "model.language_model.embed_tokens.weight_packed": (248320, 1280),
        "mtp.fc.weight_packed": (5120, 1280),
        "mtp.draft_lm_head.weight_packed": (40960, 640),
    }.items():
        assert fast[name].shape == shape
    assert fast["model.language_model.embed_tokens.weight_scale"].dtype == "bfloat16"
    gptq = _all(plan(recipe("qwen3.8-27b-gptq")))
    down = "model.language_model.layers.5.mlp.down_proj"
    assert {key: (t.dtype, t.shape) for key, t in gptq.items() if key.startswith(down)} == {
        f"{down}.qweight": ("int32", (17408 // 8, 5120)),
        f"{down}.qzeros": ("int32", (17408 // 128, 5120 // 8)),
        f"{down}.scales": ("float16", (17408 // 128, 5120)),
        f"{down}.g_idx": ("int32", (17408,)),
    }


@needs_golden
@pytest.mark.parametrize(
    "directory, prefix", [("tiny_qwen3_5", "model."), ("tiny_qwen3_5_composite", "model.language_model.")]
)
def test_names_and_shapes_are_those_of_a_golden_directory(directory, prefix):
    cfg = ModelConfig.from_hf(json.loads((GOLDEN / directory / "config.json").read_text()))
    planned = _all(plan(Recipe(cfg, prefix, format="bf16", vision=None, shard_bytes=10**9)))
    stored = read(GOLDEN / directory)
    assert {name: (t.shape, t.dtype) for name, t in planned.items()} == {
        name: (value.shape, value.dtype.name) for name, value in stored.items()
    }


@pytest.mark.parametrize("like", MODELS)
def test_configs_are_read_back(like):
    chosen = recipe(like, scale="small")
    config = hf_config(chosen)
    assert ModelConfig.from_hf(config) == chosen.cfg
    assert ("text_config" in config) == (like != "tiny")
    assert ("quantization_config" in config) == (like not in ("qwen3.8-27b", "tiny"))
    assert ModelConfig.from_hf(hf_config(recipe("qwen3.8-27b"))) == FULL


@pytest.mark.parametrize("like", MODELS)
def test_small_ones_load(tmp_path, like):
    main(["--like", like, "--scale", "small", "--vocab", "300", "--layers", "4", str(tmp_path / "m")])
    checkpoint = load_checkpoint(tmp_path / "m")
    assert (checkpoint.cfg.num_hidden_layers, checkpoint.cfg.vocab_size) == (4, 300)
    assert checkpoint.params.mtp is not None and checkpoint.notes == ()
    assert (tmp_path / "m" / INDEX).exists() == (like != "tiny")


def test_values_are_of_a_realistic_size(tmp_path):
    tensors = read(make(tmp_path / "m", hidden_size=128))
    for name, value in tensors.items():
        values = value.astype(np.float32)
        assert np.isfinite(values).all(), name
        if value.ndim == 2:
            assert 0.8 < values.std() * value.shape[1] ** 0.5 < 1.2, name
        elif name.endswith("linear_attn.norm.weight"):
            assert 0.7 < values.min() <= values.max() < 1.3, name
        elif name.endswith("norm.weight"):
            assert np.abs(values).max() < 0.4, name
        elif name.endswith("A_log"):
            assert np.log(0.05) <= values.min() <= values.max() <= np.log(8), name


def test_w4a16_uses_all_codes_and_both_signs(tmp_path):
    write(tmp_path / "m", recipe("qwen3.8-27b-w4a16", scale="small"))
    tensors = read(tmp_path / "m")
    index = json.loads((tmp_path / "m" / INDEX).read_text())["weight_map"]
    assert {index[name] for name in tensors if name.startswith("mtp.")} == {"model_extra_tensors.safetensors"}
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    words, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"].astype(np.float32)
    n, k = tensors[f"{name}_shape"]
    assert (words.dtype, words.shape, scale.shape) == (np.int32, (n, k // 8), (n, k // 128))
    codes = ((words[:, :, None] >> (4 * np.arange(8))) & 15).reshape(n, k) - 8
    assert set(np.unique(codes)) == set(range(-8, 8))
    assert 0.35 < (scale < 0).mean() < 0.65
    weight = codes * np.repeat(scale, 128, axis=1)
    assert 0.8 < weight.std() * k**0.5 < 1.2


def test_the_seed_decides_every_value(tmp_path):
    chosen = recipe("qwen3.8-27b-w4a16", scale="small", layers=4)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, chosen, seed=seed)
    a, b, c = (read(tmp_path / name) for name in "abc")
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert name.endswith("weight_shape") or not np.array_equal(a[name], c[name]), name


def test_tensors_differ_from_each_other(tmp_path):
    tensors = [value.tobytes() for value in read(make(tmp_path / "m")).values()]
    assert len(set(tensors)) == len(tensors)


def test_vision_can_be_left_out(tmp_path):
    main(["--like", "qwen3.8-27b", "--scale", "small", "--no-vision", str(tmp_path / "m")])
    assert not any(names.parse(name).kind == "vision" for name in read(tmp_path / "m"))


def test_a_tokenizer_can_be_copied(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    main(["--like", "tiny", "--tokenizer", str(tmp_path / "t"), str(tmp_path / "m")])
    assert (tmp_path / "m" / "tokenizer.json").exists()


def test_a_small_disk_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: writing.shutil._ntuple_diskusage(9, 4, 123_456))
    with pytest.raises(CheckpointError, match="55,562,855,904 bytes.*123,456 free"):
        write(tmp_path / "m", recipe("qwen3.8-27b"))
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_no_directory(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen38_jax.checkpoint.synthetic.draw.Draw.words", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m", recipe("qwen3.8-27b-w4a16", scale="small"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--like", "qwen3.8-27b", "--scale", "small", "--layers", "6"], "not whole groups"),
        (["--like", "tiny", "--scale", "full"], "tiny only small"),
        (["--like", "tiny", "--vocab", "0"], "vocab_size"),
        (["--like", "tiny", "--tokenizer", "/nonexistent"], "tokenizer.json"),
    ],
)
def test_bad_requests_are_told(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        main([*arguments, str(tmp_path / "m")])
    assert list(tmp_path.iterdir()) == []


def test_rows_are_drawn_in_small_pieces():
    """Full size is written with little memory: no array is more than a few tens of megabytes."""
    tensors = _all(plan(recipe("qwen3.8-27b")))
    first = next(iter(tensors["lm_head.weight"].rows()))
    assert first.nbytes <= 32 << 20
    packed = _all(plan(recipe("qwen3.8-27b-w4a16")))["model.language_model.layers.0.mlp.up_proj.weight_packed"]
    pieces = [array.shape for array in packed.rows()]
    assert max(rows * words for rows, words in pieces) <= 8 << 20 and sum(rows for rows, _ in pieces) == 17408


def test_workers_change_no_byte(tmp_path):
    chosen = recipe("qwen3.8-27b-fast", scale="small", layers=4)
    for workers in (1, 5):
        write(tmp_path / str(workers), chosen, seed=3, workers=workers)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / str(workers)).iterdir()} for workers in (1, 5)
    )
    assert first == second and len(first) > 5
    with pytest.raises(SystemExit):
        main(["--like", "tiny", "--workers", "0", str(tmp_path / "m")])


def test_a_tensor_of_another_size_than_announced_is_an_error(tmp_path):
    for rows in (1, 3):
        wrong = NewTensor("x", "float32", (2, 4), lambda rows=rows: [np.ones((rows, 4), np.float32)])
        with pytest.raises(ValueError, match=f"'x' was announced with 32 bytes, got {16 * rows}"):
            writing.write_shards(tmp_path, {"model.safetensors": [wrong]})


def test_the_full_drafters_have_the_published_tensors():
    tensors = _all(plan(recipe("qwen3.8-27b-dflash2")))
    assert len(tensors) == 81 and {tensor.dtype for tensor in tensors.values()} == {"bfloat16"}
    assert sum(tensor.nbytes for tensor in tensors.values()) == pytest.approx(2 * 1924.4e6, rel=1e-4)
    assert tensors.keys() == {*_DRAFTER_TOP, *(f"layers.{i}.{name}" for i in range(5) for name in _DRAFTER_LAYER)}
    for name, tensor in tensors.items():
        assert tensor.shape == (_DRAFTER_TOP | _DRAFTER_LAYER)[name.split(".", 2)[2] if name[:6] == "layers" else name]
    packed = _all(plan(recipe("qwen3.8-27b-dflash2-w4a16")))
    words = {name.removesuffix("_packed") for name in packed if name.endswith("_packed")}
    assert len(words) == 36 and "fc.weight" in words and len(packed) == 81 + 2 * 36
    assert {name.split(".")[-2] for name in words} == {"fc"} | {
        f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert packed["fc.weight_packed"].shape == (5120, 25600 // 8)
    assert packed["layers.4.mlp.down_proj.weight_scale"].shape == (5120, 17408 // 128)
    assert sum(tensor.nbytes for tensor in packed.values()) == pytest.approx(1.19 * 2**30, rel=0.01)


# Restated from the published inventory.
_DRAFTER_TOP = {
    "fc.weight": (5120, 25600),
    "hidden_norm.weight": (5120,),
    "norm.weight": (5120,),
    "candidate_selector.hidden_projection.weight": (256, 5120),
    "candidate_selector.predecessor_codebook": (248320, 256),
    "candidate_selector.successor_codebook": (248320, 256),
}
_DRAFTER_LAYER = {
    "input_layernorm.weight": (5120,),
    "post_attention_layernorm.weight": (5120,),
    "self_attn.q_proj.weight": (4096, 5120),
    "self_attn.k_proj.weight": (1024, 5120),
    "self_attn.v_proj.weight": (1024, 5120),
    "self_attn.o_proj.weight": (5120, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "attention_conv.base_kernel": (2, 2, 5120),
    "attention_conv.kernel_projection.weight": (1280, 5120),
    "mlp_conv.base_kernel": (2, 2, 5120),
    "mlp_conv.kernel_projection.weight": (1280, 5120),
    "mlp.gate_proj.weight": (17408, 5120),
    "mlp.up_proj.weight": (17408, 5120),
    "mlp.down_proj.weight": (5120, 17408),
}
