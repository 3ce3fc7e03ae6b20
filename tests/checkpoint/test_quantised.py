"""Whole models in every quantised format against the dense model made of their dequantised weights."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qwen38_jax.block import chain_block
from qwen38_jax.checkpoint import CheckpointError, describe, load_checkpoint, loaded_bytes
from qwen38_jax.checkpoint.draft_ids import DRAFT_IDS, write_draft_ids
from qwen38_jax.checkpoint.files import read_header, read_rows
from qwen38_jax.checkpoint.synthetic import FORMATS, recipe, write
from qwen38_jax.drafters.mtp import mtp_forward
from qwen38_jax.layers.linear import linear
from qwen38_jax.model import logits
from qwen38_jax.params import cast, tree_bytes
from qwen38_jax.quantization import QuantTensor, dequantize, is_quantised
from qwen38_jax.state import StateConfig, init_state
from tests.checkpoint.packing import values
from tests.checkpoint.small import assert_same, edit, edit_json
from tests.models import extend, prompt

QUANTISED = FORMATS[1:]
_mtp = jax.jit(mtp_forward, static_argnames="cfg")
BODY = "model.language_model.layers"


def read_all(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory; the library's own reader knows no FP8."""
    infos = [tensor for file in sorted(path.glob("*.safetensors")) for tensor in read_header(file).values()]
    return {tensor.name: read_rows(tensor, 0, tensor.shape[0]) for tensor in infos}


def dequantised(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The dense tensors that quantised ones stand for, by the definitions of the formats."""
    dense = {}
    for name, value in tensors.items():
        module, _, part = name.rpartition(".")
        get = lambda part, module=module: tensors[f"{module}.{part}"]  # noqa: E731
        if part == "weight_packed":
            scale = get("weight_scale").astype(np.float32)
            n, k = get("weight_shape")
            bits = 32 * value.shape[1] // k
            codes = values(value, bits, 1) - 2 ** (bits - 1)
            dense[f"{module}.weight"] = codes.astype(np.float32) * np.repeat(scale, k // scale.shape[1], axis=1)
        elif part == "qweight":
            scale, zeros = get("scales").astype(np.float32), values(get("qzeros"), 4, 1) + 1
            codes = values(value, 4, 0) - zeros[get("g_idx")]
            dense[f"{module}.weight"] = np.ascontiguousarray((codes.astype(np.float32) * scale[get("g_idx")]).T)
        elif value.dtype == ml_dtypes.float8_e4m3fn:
            blocks = np.kron(get("weight_scale_inv").astype(np.float32), np.ones((128, 128), np.float32))
            dense[name] = value.astype(np.float32) * blocks[: value.shape[0], : value.shape[1]]
        elif part in ("weight", "A_log", "dt_bias"):
            dense[name] = value
    return dense


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """format -> a checkpoint in it, and the same weights in a dense one."""
    made = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            write(root / "q", recipe(f"qwen3.8-27b-{name}", scale="small", layers=4, vision=False))
            dense = dequantised(read_all(root / "q"))
            (root / "d").mkdir()
            save_file({n: v for n, v in dense.items() if "draft_lm_head" not in n}, root / "d" / "model.safetensors")
            config = json.loads((root / "q" / "config.json").read_text())
            config.pop("quantization_config")
            (root / "d" / "config.json").write_text(json.dumps(config))
            made[name] = root / "q", root / "d"
        return made[name]

    return get


def _matrices(params):
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@jax.jit
def _dequantised_params(params):
    return jax.tree.map(dequantize, params, is_leaf=is_quantised)


@pytest.mark.parametrize("name", QUANTISED)
def test_each_format_loads_exactly(pairs, name):
    quantised, dense = pairs(name)
    q, d = load_checkpoint(quantised, dtype="float32"), load_checkpoint(dense, dtype="float32")
    assert q.notes == () and q.cfg.mtp_num_hidden_layers == 1
    got, want = _matrices(_dequantised_params(q.params)), _matrices(d.params)
    for path in want:
        assert got[path].dtype == jnp.float32
        np.testing.assert_array_equal(got[path], want[path], err_msg=path)
    integers = {path for path, leaf in _matrices(q.params).items() if is_quantised(leaf)}
    assert len(integers) == {"w4a16": 8, "gptq": 8, "gptq-act-order": 8, "fp8": 0, "fast": 8 + 2 + 5}[name]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_model_computes_what_its_dequantised_weights_do(pairs, name):
    rows = []
    for path in pairs(name):
        checkpoint = load_checkpoint(path, dtype="float32")
        params, cfg = checkpoint.params, checkpoint.cfg
        tokens = prompt(9, batch=2, vocab=cfg.vocab_size)
        hidden, state = extend(params, cfg, init_state(cfg, StateConfig(2, 16, page=8)), tokens, chunk=6)
        draft, _ = _mtp(
            params,
            cfg,
            chain_block(tokens, jnp.zeros(2, jnp.int32)),
            hidden,
            jax.tree.map(lambda t: jnp.zeros_like(t[:1]), state.kv),
            state.block_table,
            jnp.zeros(2, jnp.int32),
        )
        rows.append((logits(params, hidden), logits(params, draft)))
    for got, want in zip(*rows, strict=True):
        assert 0.1 < np.std(want) < 10
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


def test_the_draft_head_comes_with_its_ids(pairs):
    quantised, _ = pairs("fast")
    checkpoint = load_checkpoint(quantised, dtype="float32")
    draft = checkpoint.draft_head
    assert draft.ids.dtype == jnp.int32 and draft.weight.shape == (128, 128)
    np.testing.assert_array_equal(draft.ids, np.arange(128) * 4)
    weight = dequantised(read_all(quantised))["mtp.draft_lm_head.weight"]
    np.testing.assert_array_equal(dequantize(draft.weight), weight)
    x = jax.random.normal(jax.random.key(0), (3, 128))
    np.testing.assert_allclose(linear(x, draft.weight), x @ weight.T, atol=1e-5)
    assert load_checkpoint(pairs("w4a16")[0]).draft_head is None


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bytes_are_known_beforehand(pairs, name, dtype):
    path, _ = pairs(name)
    checkpoint = load_checkpoint(path, dtype=dtype)
    held = tree_bytes((checkpoint.params, checkpoint.draft_head))
    announced = loaded_bytes(path, dtype=dtype)
    assert held * 0.99 <= announced <= held * 1.05


def test_integers_take_the_bytes_of_the_file(pairs):
    path, _ = pairs("w4a16")
    fused = load_checkpoint(path).params.full.mlp.gate_up
    stored = read_all(path)
    names = [f"{BODY}.3.mlp.{part}_proj.weight" for part in ("gate", "up")]
    codes, scales = (np.concatenate([stored[name + part] for name in names]) for part in ("_packed", "_scale"))
    assert fused.codes.nbytes == codes.nbytes
    np.testing.assert_array_equal(fused.codes[0], codes.view(np.uint8))
    np.testing.assert_array_equal(fused.scales[0], scales)
    assert (np.asarray(fused.scales) < 0).any() and fused.dtype == "bfloat16"


def test_cast_changes_what_integers_stand_for(pairs):
    checkpoint = load_checkpoint(pairs("fast")[0], dtype="bfloat16")
    params = cast(checkpoint.params, load_checkpoint(pairs("fast")[0], dtype="float32").cfg)
    assert params.embed.dtype == "float32" and params.embed.scales.dtype == jnp.bfloat16
    np.testing.assert_array_equal(params.embed.codes, checkpoint.params.embed.codes)


def _copy(pairs, name, tmp_path) -> Path:
    """A copy in one file, free to change."""
    source, path = pairs(name)[0], tmp_path / "m"
    path.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".pt") and "index" not in file.name:
            (path / file.name).write_bytes(file.read_bytes())
    save_file(read_all(source), path / "model.safetensors")
    return path


@pytest.mark.parametrize("claim", ["nothing", "another method", "all of it"])
def test_claims_of_config_json_decide_nothing(pairs, tmp_path, claim):
    path = _copy(pairs, "fast", tmp_path)
    claims = {
        "nothing": lambda config: config.pop("quantization_config"),
        "another method": lambda config: config.update(quantization_config={"quant_method": "awq", "bits": 8}),
        "all of it": lambda config: config["quantization_config"].update(ignore=["re:.*", "mtp", "model.layers.0"]),
    }
    edit_json(path, claims[claim])
    got, want = load_checkpoint(path), load_checkpoint(pairs("fast")[0])
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
def test_quantised_tensors_are_found_under_every_prefix(pairs, tmp_path, prefix):
    path = _copy(pairs, "gptq-act-order", tmp_path)

    def rename(tensors):
        for name in list(tensors):
            if name.startswith("model.language_model."):
                tensors[prefix + name.removeprefix("model.language_model.")] = tensors.pop(name)

    edit(path, rename)
    want = load_checkpoint(pairs("gptq-act-order")[0]).params
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(path).params, want)


def _dequantise_one(tensors, weight):
    dense = dequantised(tensors)[weight]
    for name in list(tensors):
        if name.startswith(weight):
            tensors.pop(name)
    tensors[weight] = dense


def test_layers_of_one_kind_stored_differently_are_an_error_that_names_both(pairs, tmp_path):
    path = _copy(pairs, "w4a16", tmp_path)
    name = f"{BODY}.2.mlp.down_proj.weight"
    edit(path, lambda tensors: _dequantise_one(tensors, name))
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    for fragment in (name, "as f32", f"{BODY}.0.mlp.down_proj.weight_packed", "as int4 group 128", "stored alike"):
        assert fragment in str(raised.value)
    assert str(raised.value) in describe(path).problems


def test_layers_of_different_kinds_may_be_stored_differently(pairs, tmp_path):
    path = _copy(pairs, "w4a16", tmp_path)
    name = f"{BODY}.3.mlp.down_proj.weight"  # the only attention layer
    edit(path, lambda tensors: _dequantise_one(tensors, name))
    params = load_checkpoint(path, dtype="float32").params
    np.testing.assert_array_equal(params.full.mlp.down[0], dequantised(read_all(pairs("w4a16")[0]))[name])
    assert isinstance(params.linear.mlp.down, QuantTensor)


def test_fp8_and_bf16_layers_may_be_mixed(pairs, tmp_path):
    path = _copy(pairs, "fp8", tmp_path)
    source, name = read_all(path), f"{BODY}.1.mlp.up_proj.weight"
    source[name] = dequantised(source)[name].astype(ml_dtypes.bfloat16)
    del source[f"{name}_scale_inv"]
    save_file(source, path / "model.safetensors")
    got, want = (load_checkpoint(p).params.linear.mlp.gate_up for p in (path, pairs("fp8")[0]))
    np.testing.assert_array_equal(got, want)


def test_a_tied_embedding_may_be_quantised(pairs, tmp_path):
    path = _copy(pairs, "fast", tmp_path)

    def tie(tensors, copy):
        for name in list(tensors):
            if name.startswith("lm_head."):
                del tensors[name]
            elif copy and name.startswith("model.language_model.embed_tokens."):
                tensors["lm_head." + name.rpartition(".")[2]] = tensors[name]

    edit_json(path, lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight_(packed|scale)' differs from"):
        load_checkpoint(path)
    for copy in (True, False):
        edit(path, lambda tensors, copy=copy: tie(tensors, copy))
        checkpoint = load_checkpoint(path, dtype="float32")
        assert checkpoint.params.lm_head is None
        x = jax.random.normal(jax.random.key(0), (2, 128))
        assert logits(checkpoint.params, x).shape == (2, 512)


@pytest.mark.parametrize(
    "ids, words",
    [
        (None, ["missing", "mtp.draft_lm_head"]),
        (np.arange(127), ["127 tokens", "128 rows"]),
        (np.arange(128)[::-1], ["ascending"]),
        (np.zeros(128, int), ["1 different ones of 128"]),
        (np.arange(128) + 512 - 127, ["from 385 to 512", "below 512"]),
        (np.arange(128) - 1, ["from -1"]),
    ],
)
def test_draft_ids_that_do_not_fit_the_head(pairs, tmp_path, ids, words):
    path = _copy(pairs, "fast", tmp_path)
    (path / DRAFT_IDS).unlink()
    if ids is not None:
        write_draft_ids(path / DRAFT_IDS, ids)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    for word in (DRAFT_IDS, *words):
        assert word in str(raised.value)
    assert str(raised.value) in describe(path).problems


@pytest.mark.parametrize(
    "name, part, label",
    [
        ("w4a16", "mlp", "int4 group 128 (compressed-tensors)"),
        ("fast", "embed", "int8 per channel (compressed-tensors)"),
        ("fast", "head", "int4 per channel (compressed-tensors)"),
        ("gptq", "mlp", "int4 group 128 (GPTQ)"),
        ("fp8", "mtp", "fp8 128x128 blocks"),
    ],
)
def test_inspect_names_the_format_of_each_class(pairs, name, part, label):
    d = describe(pairs(name)[0])
    assert d.loadable and label in next(c for c in d.classes if c.name == part).formats
    assert label in d.quantised


@pytest.mark.parametrize("name, layout", [("fast", "mma"), ("gptq-act-order", "rows")])
def test_integers_are_packed_on_their_way_to_a_device_with_kernels(tmp_path, monkeypatch, name, layout):
    write(tmp_path / "m", recipe(f"qwen3.8-27b-{name}", scale="small", layers=4, vocab=500, vision=False))
    want = load_checkpoint(tmp_path / "m")
    monkeypatch.setattr("qwen38_jax.checkpoint.load.packs_on_load", lambda: True)
    monkeypatch.setattr("qwen38_jax.checkpoint.unpack.CHUNK_BYTES", 4 * 64 * 64 * 3)  # three blocks of int4 rows
    got = load_checkpoint(tmp_path / "m")
    assert_same((got.params, got.draft_head), (want.params, want.draft_head))
    assert got.params.full.mlp.down.layout == layout
    if name == "fast":
        assert (got.params.embed.layout, got.params.lm_head.layout, got.draft_head.weight.layout) == (
            "rows",
            "mma",
            "mma",
        )
        assert (
            got.draft_head.weight.shape == (125, 128) and got.params.lm_head.codes.shape[0] == 8
        )  # 500 rows in blocks
