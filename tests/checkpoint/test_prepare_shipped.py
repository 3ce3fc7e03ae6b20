"""The checkpoint that ships, quantised in every format that is read and with every option of `prepare`, end to end."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from qwen38_jax import cli
from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.checkpoint.prepare import Options
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.model import logits
from qwen38_jax.quantization import QuantTensor, dequantize, is_quantised
from qwen38_jax.training.forward import mtp_sequence, sequence_forward
from scripts.prepare_checkpoint import main
from tests.checkpoint.packing import awq, compressed, gptq
from tests.checkpoint.small import assert_same, read
from tests.checkpoint.test_prepare import KEEP, contents, prepare
from tests.models import prompt

GROUP = 64  # divides every row of this model: 704 is 11 times as much


def rounded(w: np.ndarray, bits=4, group=GROUP, *, symmetric=True, order=False, dtype="float16") -> SimpleNamespace:
    """A matrix rounded to the nearest, as `packing` takes it; half of the scales are negative."""
    n, k = w.shape
    group = group or k
    rng, middle = np.random.default_rng(k), 2 ** (bits - 1)
    g_idx = rng.permutation(np.arange(k) // group) if order else np.arange(k) // group
    columns = np.argsort(g_idx, kind="stable")
    grouped = w[:, columns].reshape(n, k // group, group)
    s = np.abs(grouped).max(-1) / (middle - 1) * rng.choice([-1, 1], (n, k // group))
    s = s.astype(dtype)
    z = np.full(s.shape, middle) if symmetric else rng.integers(middle - 2, middle + 2, s.shape)
    u = np.clip(np.rint(w / s.astype(np.float32)[:, g_idx]) + z[:, g_idx], 0, 2 * middle - 1).astype(int)
    matrix = (u - z[:, g_idx]).astype(np.float32) * s.astype(np.float32)[:, g_idx]
    return SimpleNamespace(u=u, z=z, s=s, g_idx=g_idx.astype(np.int32), matrix=matrix, bits=bits)


def _fp8(w):
    n, k = w.shape
    blocks = np.pad(np.abs(w), ((0, -n % 128), (0, -k % 128))).reshape(-(-n // 128), 128, -(-k // 128), 128)
    scale = (blocks.max((1, 3)) / 448).astype("bfloat16")
    each = np.kron(scale.astype(np.float32), np.ones((128, 128), np.float32))[:n, :k]
    values = (w / each).astype("float8_e4m3fn")
    return {"weight": values, "weight_scale_inv": scale}, values.astype(np.float32) * each


def _integers(parts, **arguments):
    def make(w):
        m = rounded(w, **arguments)
        return parts(m), m.matrix

    return make


FORMATS = {
    "compressed-tensors int4": _integers(compressed),
    "compressed-tensors int4 asymmetric": _integers(lambda m: compressed(m, zeros=True), symmetric=False),
    "compressed-tensors int8 per channel": _integers(compressed, bits=8, group=None, dtype="bfloat16"),
    "gptq": _integers(gptq),
    "gptq act-order": _integers(gptq, order=True),
    "awq": _integers(awq, symmetric=False),
    "fp8": _fp8,
}


def write(directory: Path, tensors: dict[str, np.ndarray], **config) -> Path:
    directory.mkdir()
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, directory / "model.safetensors")
    shipped = json.loads((SHIPPED_CHECKPOINT / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(shipped | config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (directory / name).write_bytes((SHIPPED_CHECKPOINT / name).read_bytes())
    return directory


def quantised_copy(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """The shipped checkpoint with the linears of its layers in a format, and a dense one of their exact values."""
    quantised, dense = {}, {}
    for tensor, value in read(SHIPPED_CHECKPOINT).items():
        if ".layers." in tensor and "_proj" in tensor and "in_proj_a" not in tensor and "in_proj_b" not in tensor:
            parts, dense[tensor] = FORMATS[name](value.astype(np.float32))
            quantised |= {tensor.removesuffix("weight") + part: array for part, array in parts.items()}
        else:
            quantised[tensor] = dense[tensor] = value
    config = {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq"}} if "gptq" in name else {}
    return write(tmp_path / "quantised", quantised, **config), write(tmp_path / "dense", dense)


@jax.jit
def as_dense(params):
    return jax.tree.map(dequantize, params, is_leaf=is_quantised)


@jax.jit
def scores(params):
    """Logits of the trunk and of the MTP head, of a prompt."""
    tokens = prompt(40, vocab=8000)
    hidden = sequence_forward(params, CFG, tokens)
    return logits(params, hidden), logits(params, mtp_sequence(params, CFG, tokens, hidden))


CFG = load_checkpoint(SHIPPED_CHECKPOINT, dtype="float32").cfg


def assert_scores(params, want):
    for got, expected in zip(scores(params), scores(want), strict=True):
        assert np.std(expected) > 1
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_loads_prepares_and_computes_what_its_weights_are(tmp_path, name):
    source, dense = quantised_copy(tmp_path, name)
    before = contents(source)
    want = load_checkpoint(dense, dtype="float32").params
    params = load_checkpoint(source, dtype="float32").params
    assert_same(as_dense(params), want)
    manifest = prepare(source, tmp_path / "prepared")
    assert contents(source) == before
    again = load_checkpoint(tmp_path / "prepared", dtype="float32").params
    if name == "fp8":  # becomes bf16
        exact = {name: getattr(want.linear.mixer, name) for name in ("A_log", "dt_bias")}
        want = jax.tree.map(lambda w: w.astype("bfloat16").astype("float32"), want)
        want = want.replace(linear=want.linear.replace(mixer=want.linear.mixer.replace(**exact)))
        assert_same(again, want)
    else:
        assert_same(again, params)
        assert all(record["relative_rms_error"] == 0 for record in manifest["tensors"].values())
        assert isinstance(again.linear.mlp.down, QuantTensor)
    assert_scores(again, want)


OPTIONS = {
    "default": [],
    "all int4": ["--head", "int4", "--embedding", "int8", "--mtp", "int4", "--body", "int4", "--draft-vocab", "IDS"],
    "all int8": ["--head", "int8", "--embedding", "int8", "--mtp", "int8", "--body", "int8"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_computes_what_its_weights_are(tmp_path, name):
    (tmp_path / "ids.json").write_text(json.dumps(list(range(0, 8192, 3))))
    arguments = [str(tmp_path / "ids.json") if word == "IDS" else word for word in OPTIONS[name]]
    before = contents(SHIPPED_CHECKPOINT)
    main([str(SHIPPED_CHECKPOINT), str(tmp_path / "m"), *arguments])
    assert contents(SHIPPED_CHECKPOINT) == before
    checkpoint = load_checkpoint(tmp_path / "m", dtype="float32")
    params, dense = checkpoint.params, as_dense(checkpoint.params)
    assert_scores(params, dense)
    exact = load_checkpoint(SHIPPED_CHECKPOINT, dtype="float32").params
    difference = np.asarray(scores(params)[0] - scores(exact)[0])
    assert 1e-3 < np.sqrt(np.mean(difference**2)) < (2.0 if name == "all int4" else 0.3)
    if "IDS" in OPTIONS[name]:
        rows = dense.lm_head[checkpoint.draft_head.ids]
        np.testing.assert_array_equal(dequantize(checkpoint.draft_head.weight), rows)
        assert checkpoint.draft_head.weight.bits == 4


def test_keeping_everything_is_the_shipped_checkpoint(tmp_path):
    prepare(SHIPPED_CHECKPOINT, tmp_path / "m", KEEP)
    for dtype in (None, "float32"):
        got, want = (load_checkpoint(path, dtype=dtype) for path in (tmp_path / "m", SHIPPED_CHECKPOINT))
        assert_same(got.params, want.params)
    np.testing.assert_array_equal(scores(got.params)[0], scores(want.params)[0])


def test_a_prepared_checkpoint_answers(tmp_path, capsys):
    prepare(SHIPPED_CHECKPOINT, tmp_path / "m", Options())
    question = [
        "--chat",
        "Repeat the string below exactly.\n\nqX7-blue_harbor/42",
        "--no-thinking",
        "--temperature",
        "0",
    ]
    arguments = ["generate", "--checkpoint", str(tmp_path / "m"), *question, "--max-new-tokens", "20", "--json"]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "qX7-blue_harbor/42"
