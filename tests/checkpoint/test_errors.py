"""Every fault of a directory is one CheckpointError that names file, tensor and remedy, and nothing is read."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from qwen38_jax.checkpoint import CheckpointError, describe, load_checkpoint, require_tokenizer
from qwen38_jax.checkpoint.files import INDEX, read_header
from tests.checkpoint.small import edit, edit_header, edit_index, edit_json, make

UP = "model.layers.1.mlp.up_proj.weight"
ONE = "model.safetensors"
FIRST, LAST = "model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"


def _cast(name, dtype):
    return lambda path: edit(path, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))


def _replace(name, *others, dtype=np.int32):
    """Takes a weight out and puts others, of another format, in its place."""

    def change(tensors):
        tensors.pop(name)
        tensors.update({other: np.zeros((4, 2), dtype) for other in others})

    return lambda path: edit(path, change)


def _header(name, **changes):
    return lambda path: edit_header(path, lambda header: header[name].update(changes))


def _shift(name, begin, end):
    def change(header):
        old = header[name]["data_offsets"]
        header[name]["data_offsets"] = [old[0] + begin, old[1] + end]

    return lambda path: edit_header(path, change)


def _mix_prefixes(tensors):
    tensors["model.language_model.norm.weight"] = tensors.pop("model.norm.weight")


def _truncate(path):
    raw = (path / ONE).read_bytes()
    (path / ONE).write_bytes(raw[:-10])


def _fp8(header):
    # The bytes stay; half as many values per byte would not fit, so the shape takes the rest.
    rows, width = header[UP]["shape"]
    header[UP].update(dtype="F8_E4M3", shape=[4 * rows, width])


def _duplicate_key(path):
    raw = (path / ONE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].rstrip().decode()
    entry = json.dumps(json.loads(text)[UP])
    text = f'{text[:-1]},"{UP}":{entry}}}'.encode()
    (path / ONE).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


# fault -> (how to make it, what the message must say besides the remedy)
SINGLE = {
    "missing": (lambda p: edit(p, lambda t: t.pop(UP)), [ONE, UP, "lacks"]),
    "unexpected": (lambda p: edit(p, lambda t: t.update({"model.layers.9.x": t[UP]})), [ONE, "model.layers.9.x"]),
    "unknown part": (lambda p: edit(p, lambda t: t.update({"value_head.weight": t[UP]})), [ONE, "value_head.weight"]),
    "wrong shape": (lambda p: edit(p, lambda t: t.update({UP: t[UP].T})), [ONE, UP, "[16, 32]", "[32, 16]"]),
    "squeezed conv": (
        lambda p: edit(p, lambda t: t.update({CONV: t[CONV][:, 0]})),
        [ONE, "conv1d", "1, 4]"],
    ),
    "integers": (_cast(UP, np.int32), [ONE, UP, "I32"]),
    "double": (_cast(UP, np.float64), [ONE, UP, "F64"]),
    "mixed prefixes": (lambda p: edit(p, _mix_prefixes), [ONE, "model.language_model.norm.weight", "prefix"]),
    "two spellings": (
        lambda p: edit(p, lambda t: t.update({"model.mtp.norm.weight": t["mtp.norm.weight"]})),
        [ONE, "'model.mtp.norm.weight'", "'mtp.norm.weight'"],
    ),
    "part of mtp": (lambda p: edit(p, lambda t: t.pop("mtp.fc.weight")), [ONE, "mtp.fc.weight", "incomplete"]),
    "untied without head": (
        lambda p: edit(p, lambda t: t.pop("lm_head.weight")),
        [ONE, "lm_head.weight", "tie_word_embeddings"],
    ),
    "truncated": (_truncate, [ONE, "ends at byte", "truncated", "tensor"]),
    "empty file": (lambda p: (p / ONE).write_bytes(b""), [ONE, "not a whole safetensors file"]),
    "lfs pointer": (
        lambda p: (p / ONE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        [ONE, "LFS"],
    ),
    "header not json": (lambda p: (p / ONE).write_bytes((4).to_bytes(8, "little") + b"{..}"), [ONE, "header"]),
    "header a list": (lambda p: (p / ONE).write_bytes((2).to_bytes(8, "little") + b"[]"), [ONE, "header"]),
    "name twice in header": (_duplicate_key, [ONE, UP, "twice"]),
    "offset beyond the file": (_shift("mtp.norm.weight", 10**6, 10**6), [ONE, "mtp.norm.weight", "ends at byte"]),
    "overlap": (_shift(UP, -4, -4), [ONE, UP, "overlaps"]),
    "gap": (_shift(UP, 4, 4), [ONE, UP, "gap"]),
    "wrong byte length": (_header(UP, shape=[32, 15]), [ONE, UP, "2048 bytes", "1920 bytes"]),
    "negative size": (_header(UP, shape=[-32, -16]), [ONE, UP, "malformed"]),
    "entry without dtype": (lambda p: edit_header(p, lambda h: h[UP].pop("dtype")), [ONE, UP, "malformed"]),
    "unknown dtype": (_header(UP, dtype="F12"), [ONE, UP, "F12"]),
    "trailing bytes": (lambda p: edit_header(p, lambda h: h.pop(_last(h))), [ONE, "behind its last tensor"]),
    "no weights": (lambda p: (p / ONE).unlink(), ["*.safetensors"]),
    "no config": (lambda p: (p / "config.json").unlink(), ["config.json", "missing"]),
    "config not json": (lambda p: (p / "config.json").write_text("{"), ["config.json", "JSON"]),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), ["config.json", "object"]),
    "config not utf-8": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe{"), ["config.json", "JSON"]),
    "config lacks a size": (lambda p: edit_json(p, lambda c: c.pop("vocab_size")), ["config.json", "vocab_size"]),
    "config of another model": (
        lambda p: edit_json(p, lambda c: c.update(vocab_size=33)),
        [ONE, "embed_tokens", "[33, 16]"],
    ),
    "stop id outside": (
        lambda p: edit_json(p, lambda c: c.update(eos_token_id=[0, 32]), "generation_config.json"),
        ["generation_config.json", "32"],
    ),
    "stop id no number": (
        lambda p: edit_json(p, lambda c: c.update(eos_token_id="0"), "generation_config.json"),
        ["generation_config.json", "eos_token_id"],
    ),
    "compressed-tensors": (
        _replace(UP, *(UP + suffix for suffix in ("_packed", "_scale", "_shape"))),
        [ONE, UP + "_packed", "I32 [4, 2]", "[32, 16]", "[32, 2] (4 bits) or [32, 4] (8 bits)"],
    ),
    "gptq": (
        _replace(UP, *(UP.removesuffix("weight") + part for part in ("qweight", "qzeros", "scales", "g_idx"))),
        [ONE, "up_proj.qweight", "I32 [4, 2]", "[2, 32] (4 bits) or [4, 32] (8 bits)"],
    ),
    "fp8 without scales": (lambda p: edit_header(p, _fp8), [ONE, UP, "F8_E4M3", "not supported"]),
    "block scales beside floats": (
        lambda p: edit(p, lambda t: t.update({UP + "_scale_inv": np.ones((1, 1), np.float32)})),
        [ONE, UP, "F32", "expected one of F8_E4M3"],
    ),
    "nvfp4": (
        lambda p: edit(p, lambda t: t.update({UP + "_scale_2": np.ones(1, np.float32)})),
        [ONE, UP, "NVFP4", "not supported"],
    ),
}
CONV = "model.layers.0.linear_attn.conv1d.weight"


def _last(header):
    return max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])


def _copy_into(source, target):
    """The first tensor of one shard, in another shard as well."""

    def fault(path):
        name, value = next(iter(load_file(path / source).items()))
        edit(path, lambda tensors: tensors.update({name: value}), target)

    return fault


SHARDED = {
    "index names a missing shard": (lambda p: (p / LAST).unlink(), [LAST, "missing", INDEX]),
    "tensor twice": (_copy_into(FIRST, LAST), [FIRST, LAST, "tensor", "as well"]),
    "tensor twice, no index": (
        lambda p: (_copy_into(FIRST, LAST)(p), (p / INDEX).unlink()),
        [FIRST, LAST, "tensor", "as well"],
    ),
    "index knows too much": (lambda p: edit_index(p, lambda m: m.update(extra=FIRST)), [INDEX, "'extra'", FIRST]),
    "index knows too little": (lambda p: edit_index(p, lambda m: m.pop(UP)), [INDEX, UP]),
    "index points elsewhere": (
        lambda p: edit_index(p, lambda m: m.update({UP: FIRST if m[UP] == LAST else LAST})),
        [INDEX, UP],
    ),
    "index leaves the directory": (lambda p: edit_index(p, lambda m: m.update({UP: "../x"})), [INDEX, UP, "'../x'"]),
    "index without a map": (lambda p: (p / INDEX).write_text("{}"), [INDEX, "weight_map"]),
    "index not json": (lambda p: (p / INDEX).write_text("{"), [INDEX, "JSON"]),
    "index and a single file": (lambda p: shutil.copy(p / FIRST, p / ONE), [ONE, "index"]),
}
FAULTS = [pytest.param(False, *fault, id=name) for name, fault in SINGLE.items()]
FAULTS += [pytest.param(True, *fault, id=name) for name, fault in SHARDED.items()]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """One sound checkpoint in a file and one in shards; not to be changed."""
    root = tmp_path_factory.mktemp("sound")
    paths = {shards: make(root / str(shards), shards=shards) for shards in (False, True)}
    for path in paths.values():
        load_checkpoint(path)
    return paths


@pytest.mark.parametrize("shards, fault, fragments", FAULTS)
def test_fault(sound, tmp_path, monkeypatch, shards, fault, fragments):
    path = shutil.copytree(sound[shards], tmp_path / "m")
    fault(path)
    read = []
    monkeypatch.setattr("qwen38_jax.checkpoint.files._read", lambda tensor, *_: read.append(tensor.name))
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    assert read == []
    for fragment in fragments:
        assert fragment in str(raised.value)
    # The same fault does not stop the description, which tells it too.
    assert str(raised.value).splitlines()[0] in describe(path).problems


def test_a_tied_head_that_differs_is_an_error(tmp_path):
    path = make(tmp_path / "m")
    edit_json(path, lambda config: config.update(tie_word_embeddings=True))
    for change in (
        lambda tensors: None,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].astype(np.float16)}),
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"][:8]}),
    ):
        edit(path, change)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*lm_head\.weight.*differs"):
            load_checkpoint(path)


@pytest.mark.parametrize(
    "stored, asked, value",
    [("float32", "float16", 1e6), ("float32", "bfloat16", 3.4e38), ("bfloat16", "float16", -7e4)],
)
def test_a_value_beyond_the_dtype_is_an_error(tmp_path, stored, asked, value):
    path = make(tmp_path / "m", dtype=stored)

    def spoil(tensors):
        tensors[UP] = tensors[UP].copy()
        tensors[UP][3, 4] = value

    edit(path, spoil)
    load_checkpoint(path)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path, dtype=asked)
    assert ONE in str(raised.value) and UP in str(raised.value) and asked in str(raised.value)


def test_an_infinity_in_the_file_stays_one(tmp_path):
    path = make(tmp_path / "m")
    edit(path, lambda tensors: tensors.update({UP: np.full_like(tensors[UP], np.inf)}))
    up = np.split(load_checkpoint(path, dtype="float16").params.linear.mlp.gate_up, 2, axis=1)[1]
    assert np.isinf(up[1]).all() and np.isfinite(up[0]).all()


def test_many_faults_are_told_together_and_cut_short(tmp_path):
    path = make(tmp_path / "m")
    edit(path, lambda tensors: [tensors.pop(name) for name in list(tensors)[:12]])
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    assert len(str(raised.value).splitlines()) == 11 and "2 more" in str(raised.value)


def test_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere")


def test_require_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        require_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert require_tokenizer(tmp_path) == tmp_path / "tokenizer.json"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_header_escapes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 33))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        tensors = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        # What we accept, the library accepts, and sees the same tensors in it.
        assert {name: value.shape for name, value in load_file(path).items()} == {
            name: tensor.shape for name, tensor in tensors.items()
        }
