"""Prepared checkpoints: what they load as, what their manifest says, and what is refused."""

import dataclasses
import hashlib
import json
import re
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.checkpoint import CheckpointError, describe, export_checkpoint, load_checkpoint, loaded_bytes
from qwen38_jax.checkpoint.draft_ids import DRAFT_IDS, write_draft_ids
from qwen38_jax.checkpoint.native import KEY
from qwen38_jax.checkpoint.prepare import MANIFEST, Options, plan_preparation
from qwen38_jax.checkpoint.synthetic import recipe, write
from qwen38_jax.layers.linear import embed
from qwen38_jax.params import tree_bytes
from qwen38_jax.quantization import LAYOUTS, Layout, QuantTensor, RowBlocks, dequantize, in_rows, is_quantised, quantize
from scripts.prepare_checkpoint import main
from tests.checkpoint.small import assert_same, edit, edit_json, make, read

KEEP = Options(head="keep", embedding="keep", mtp="keep")
SYNTHETIC = ("bf16", "w4a16", "fast", "gptq", "gptq-act-order", "fp8")


def prepare(source: Path, destination: Path, options: Options = KEEP) -> dict:
    return plan_preparation(source, options).run(destination)


def contents(directory: Path) -> dict[str, str]:
    """Checksum of every file below a directory."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@jax.jit
def as_dense(params):
    return jax.tree.map(dequantize, params, is_leaf=is_quantised)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of one group of layers in bf16, under the multimodal prefix."""
    return make(tmp_path_factory.mktemp("small") / "m", dtype="bfloat16", prefix="model.language_model.")


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """format -> a small synthetic checkpoint in it."""
    made = {}

    def get(name: str) -> Path:
        if name not in made:
            like = "qwen3.8-27b" if name == "bf16" else f"qwen3.8-27b-{name}"
            made[name] = tmp_path_factory.mktemp(name) / "m"
            write(made[name], recipe(like, scale="small", layers=4))
        return made[name]

    return get


@pytest.mark.parametrize("name", SYNTHETIC)
def test_keeping_everything_changes_no_weight(synthetic, tmp_path, name):
    both = {"mma", "rows"}  # an embedding is in rows, and so are columns out of order, where there are groups of them
    layouts = {"w4a16": {"mma"}, "gptq": {"mma"}, "fast": both, "gptq-act-order": both}
    source = synthetic(name)
    before = contents(source)
    manifest = prepare(source, tmp_path / "m")
    assert contents(source) == before
    got, want = load_checkpoint(tmp_path / "m"), load_checkpoint(source)
    assert_same((got.params, got.draft_head), (want.params, want.draft_head))
    leaves = jax.tree.leaves((got.params, got.draft_head), is_leaf=is_quantised)
    assert {leaf.layout for leaf in leaves if is_quantised(leaf)} == layouts.get(name, set())
    assert (got.cfg, got.prefix, got.generation_config) == (want.cfg, want.prefix, want.generation_config)
    assert loaded_bytes(tmp_path / "m") == pytest.approx(tree_bytes((got.params, got.draft_head)), rel=1e-3)
    assert describe(tmp_path / "m").loadable and got.notes == ()
    # FP8 is rounded to bf16; what was not in FP8 is not touched.
    errors = {name: record["relative_rms_error"] for name, record in manifest["tensors"].items()}
    fp8 = {name for name, record in manifest["tensors"].items() if record["was"].startswith("fp8")}
    assert {name for name, error in errors.items() if error > 0} <= fp8
    assert max(errors.values()) < 2**-8 and (max(errors.values()) > 1e-4) == (name == "fp8")


@pytest.mark.parametrize("name", ["fast", "gptq-act-order"])
def test_a_prepared_checkpoint_exports_as_its_source_does(synthetic, tmp_path, name):
    prepare(synthetic(name), tmp_path / "m")
    for source, out in ((synthetic(name), "a"), (tmp_path / "m", "b")):
        c = load_checkpoint(source)
        export_checkpoint(
            tmp_path / out, c.params, c.cfg, draft_head=c.draft_head, hf_config=c.hf_config, prefix=c.prefix
        )
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


OPTIONS = {
    "default": Options(),
    "int4": Options(head="int4", embedding="int8", mtp="int4", body="int4"),
    "int8": Options(head="int8", embedding="keep", mtp="keep", body="int8"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_asked_for_is_quantised_and_nothing_else(small, tmp_path, name):
    options = OPTIONS[name]
    prepare(small, tmp_path / "m", options)
    got, dense = load_checkpoint(tmp_path / "m").params, load_checkpoint(small).params
    assert_same(got, jax.jit(rounded_params, static_argnums=1)(dense, options))


def rounded_params(dense, options):
    """What `options` ask for, written leaf by leaf; rows of this model are too short for more than one group."""

    def rounded(leaf, choice, scales="float16"):
        bits = {"int8": 8, "int4": 4, None: 8}
        return leaf if choice == "keep" else quantize(leaf, bits[choice], leaf.shape[-1], scale_dtype=scales)

    def layer(own, choice):
        names = ("qkv", "o") if hasattr(own.mixer, "qkv") else ("qkvz", "out")
        mixer = own.mixer.replace(**{name: rounded(getattr(own.mixer, name), choice) for name in names})
        mlp = own.mlp.replace(gate_up=rounded(own.mlp.gate_up, choice), down=rounded(own.mlp.down, choice))
        return own.replace(mixer=mixer, mlp=mlp)

    return dense.replace(
        embed=rounded(dense.embed, options.embedding, "bfloat16"),
        lm_head=rounded(dense.lm_head, options.head),
        linear=layer(dense.linear, options.body),
        full=layer(dense.full, options.body),
        mtp=dense.mtp.replace(fc=rounded(dense.mtp.fc, options.mtp), layer=layer(dense.mtp.layer, options.mtp)),
    )


def test_groups_are_of_128_columns_where_that_divides_a_row(tmp_path):
    make(tmp_path / "a", hidden_size=256, intermediate_size=704, dtype="bfloat16")
    prepare(tmp_path / "a", tmp_path / "b", Options(body="int4"))
    mlp = load_checkpoint(tmp_path / "b").params.linear.mlp
    assert (mlp.gate_up.group, mlp.down.group) == (128, 64)


def test_the_manifest_tells_each_tensor_and_its_error(small, tmp_path):
    manifest = prepare(small, tmp_path / "m", OPTIONS["int4"])
    assert json.loads((tmp_path / "m" / MANIFEST).read_text()) == manifest
    hashed = contents(small)
    assert {name: entry["sha256"] for name, entry in manifest["sources"].items()} == {
        name: hashed[name] for name in ("config.json", "model.safetensors")
    }
    assert manifest["options"]["head"] == "int4" and manifest["options"]["draft_vocab"] is None

    checkpoint = load_checkpoint(tmp_path / "m", dtype="float32")
    params = as_dense(checkpoint.params)
    export_checkpoint(tmp_path / "dense", params, checkpoint.cfg, prefix=checkpoint.prefix)
    got, source = read(tmp_path / "dense"), read(small)
    assert manifest["tensors"].keys() == {n.replace("model.language_model.", "") for n in source}
    errors = []
    for name, value in source.items():
        record = manifest["tensors"][name.replace("model.language_model.", "")]
        value = value.astype(np.float64)
        error = np.sqrt(np.sum((got[name] - value) ** 2) / max(np.sum(value**2), 1e-300))
        np.testing.assert_allclose(record["relative_rms_error"], error, rtol=1e-5, atol=1e-12, err_msg=name)
        assert (error > 0) == record["is"].startswith("int") and record["was"] == "bf16"
        errors.append(error)
    assert 0.05 < max(errors) < 0.2
    gate = manifest["tensors"]["layers.1.mlp.up_proj.weight"]
    assert (gate["stored_as"], gate["rows"]) == ("linear.1.mlp.gate_up", [32, 64])
    assert gate["is"] == "int4 group 16 (rows)"


def test_vision_is_left_out_and_told(synthetic, tmp_path):
    manifest = prepare(synthetic("bf16"), tmp_path / "m")
    assert len(manifest["left_out"]) > 10 and all("visual" in name for name in manifest["left_out"])


def test_fp8_is_a_source_to_quantise_from(synthetic, tmp_path):
    prepare(synthetic("fp8"), tmp_path / "m", Options(body="int8", mtp="int8", embedding="keep", head="keep"))
    exact = load_checkpoint(synthetic("fp8"), dtype="float32").params.full.mlp.down
    want = jax.jit(lambda w: quantize(w, 8, 128))(exact)  # of the product of value and scale, not of bf16
    assert_same(load_checkpoint(tmp_path / "m").params.full.mlp.down, want.astype("bfloat16"))


def test_slices_of_different_formats_stay_apart(small, tmp_path):
    params = load_checkpoint(small).params
    q, k, v = jnp.split(params.full.mixer.qkv, [64, 80], axis=-2)
    mixer = params.full.mixer.replace(qkv=RowBlocks((quantize(q, 4, 8), k, quantize(v, 8, 16))))
    params = params.replace(full=params.full.replace(mixer=mixer))
    cfg = load_checkpoint(small).cfg
    export_checkpoint(tmp_path / "a", params, cfg)
    prepare(tmp_path / "a", tmp_path / "b")
    assert_same(load_checkpoint(tmp_path / "b").params, params)
    prepare(tmp_path / "b", tmp_path / "c")
    assert contents(tmp_path / "c") | {MANIFEST: ""} == contents(tmp_path / "b") | {MANIFEST: ""}


# --- the draft head


@pytest.mark.parametrize("head", ["int8", "int4", "keep"])
@pytest.mark.parametrize("kind", ["json", "pt"])
def test_a_draft_head_is_rows_of_the_head(small, tmp_path, monkeypatch, head, kind):
    monkeypatch.setattr("qwen38_jax.checkpoint.unpack.CHUNK_BYTES", 4 * 16 * 3)  # three rows at a time
    ids = [30, 2, 3, 31, 0, 17, 18, 9]
    if kind == "json":
        (tmp_path / "ids").write_text(json.dumps(ids))
    else:
        write_draft_ids(tmp_path / "ids", np.array(ids))
    manifest = prepare(small, tmp_path / "m", Options(head=head, draft_vocab=tmp_path / "ids"))
    checkpoint = load_checkpoint(tmp_path / "m")
    np.testing.assert_array_equal(checkpoint.draft_head.ids, sorted(ids))
    whole, cut = (dequantize(w) for w in (checkpoint.params.lm_head, checkpoint.draft_head.weight))
    np.testing.assert_array_equal(cut, whole[np.sort(ids)])
    assert isinstance(checkpoint.draft_head.weight, QuantTensor) == (head != "keep")
    record = manifest["tensors"]["mtp.draft_lm_head.weight"]
    assert record["was"] == "rows of lm_head.weight, bf16" and record["rows"] == [0, 8]
    assert "draft vocabulary ids" in manifest["sources"]


def test_a_draft_head_is_cut_again_from_a_prepared_checkpoint(synthetic, tmp_path):
    """The head of this one is quantised, and in both steps it is cut as it is."""
    (tmp_path / "ids.json").write_text(json.dumps([5, 400, 7]))
    prepare(synthetic("fast"), tmp_path / "a")
    prepare(tmp_path / "a", tmp_path / "b", Options(draft_vocab=tmp_path / "ids.json"))
    prepare(synthetic("fast"), tmp_path / "c", Options(draft_vocab=tmp_path / "ids.json"))
    assert contents(tmp_path / "b") | {MANIFEST: ""} == contents(tmp_path / "c") | {MANIFEST: ""}
    checkpoint = load_checkpoint(tmp_path / "b")
    head, drafted = checkpoint.params.lm_head, checkpoint.draft_head.weight
    assert (drafted.layout, drafted.shape, drafted.codes.shape[0]) == ("mma", (3, 128), 1)  # a block, padded
    np.testing.assert_array_equal(in_rows(drafted).codes, in_rows(head).codes[jnp.array([5, 7, 400])])
    assert loaded_bytes(tmp_path / "b") == tree_bytes((checkpoint.params, drafted))
    assert len(load_checkpoint(tmp_path / "a").draft_head.ids) == 128


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1, 32, 40]", "2 ids outside the vocabulary of 32, for example 32"),
        ("[-1, 3]", "1 ids outside the vocabulary of 32, for example -1"),
        ("[4, 4, 3]", "1 ids more than once, for example 4"),
        ("[]", "one or more token ids"),
        ("[1.5]", "one or more token ids"),
        ("[true]", "one or more token ids"),
        ('{"ids": [1]}', "must hold a JSON list"),
        ("1, 2", "no JSON list"),
        (None, "no JSON list"),
        ("[99999999999999999999999]", "must hold a JSON list"),
    ],
)
def test_bad_draft_vocabularies(small, tmp_path, text, message):
    if text is not None:
        (tmp_path / "ids.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as raised:
        plan_preparation(small, Options(draft_vocab=tmp_path / "ids.json"))
    assert "ids.json" in str(raised.value)


# --- layouts


def _transposed(w: QuantTensor) -> QuantTensor:
    codes = jax.lax.bitcast_convert_type(w.codes.reshape(*w.codes.shape[:-1], -1, 4), jnp.uint32)
    return w.replace(codes=codes.swapaxes(-1, -2), scales=w.scales.swapaxes(-1, -2), layout="words")


def _back(w: QuantTensor) -> QuantTensor:
    codes = jax.lax.bitcast_convert_type(w.codes.swapaxes(-1, -2), jnp.uint8)
    return w.replace(codes=codes.reshape(*codes.shape[:-2], -1), scales=w.scales.swapaxes(-1, -2), layout="rows")


@pytest.fixture
def words(monkeypatch):
    """A second layout: 32-bit words, columns before rows."""
    monkeypatch.setitem(LAYOUTS, "words", Layout(_transposed, _back))


def test_a_layout_is_one_entry(synthetic, tmp_path, words):
    (tmp_path / "ids.json").write_text(json.dumps([5, 400, 7]))
    options = Options(head="int4", mtp="int4", layout="words", draft_vocab=tmp_path / "ids.json")
    prepare(synthetic("w4a16"), tmp_path / "a", options)
    prepare(synthetic("w4a16"), tmp_path / "rows", dataclasses.replace(options, layout="rows"))
    a, rows = load_checkpoint(tmp_path / "a"), load_checkpoint(tmp_path / "rows")
    leaf = a.params.linear.mlp.gate_up
    assert (leaf.layout, leaf.codes.dtype, leaf.codes.shape) == ("words", jnp.uint32, (3, 16, 512))
    assert leaf.shape == rows.params.linear.mlp.gate_up.shape == (3, 512, 128)
    assert a.params.embed.layout == "rows"
    with pytest.raises(ValueError, match="must be in the layout 'rows', not 'words'"):
        embed(a.params.lm_head, jnp.array([0]))
    assert a.draft_head.weight.layout == "words"
    np.testing.assert_array_equal(*[dequantize(c.draft_head.weight) for c in (a, rows)])
    assert "int4 group 128 (words)" in describe(tmp_path / "a").quantised

    prepare(tmp_path / "a", tmp_path / "b", Options(layout="rows"))
    assert contents(tmp_path / "b") | {MANIFEST: ""} == contents(tmp_path / "rows") | {MANIFEST: ""}
    for path, out in ((tmp_path / "a", "xa"), (tmp_path / "rows", "xr")):
        c = load_checkpoint(path)
        export_checkpoint(tmp_path / out, c.params, c.cfg)
    assert contents(tmp_path / "xa") == contents(tmp_path / "xr")


def test_an_unknown_layout_is_named(small, tmp_path, monkeypatch, words):
    prepare(small, tmp_path / "m", Options(layout="words"))
    monkeypatch.delitem(LAYOUTS, "words")
    with pytest.raises(CheckpointError, match=r"'(lm_head|mtp\.fc)' in the layout 'words', .*it knows rows"):
        load_checkpoint(tmp_path / "m")
    assert any("'words'" in problem for problem in describe(tmp_path / "m").problems)
    with pytest.raises(ValueError, match="layout 'words' is unknown"):
        Options(layout="words")


def test_a_layout_that_cannot_hold_a_matrix(small, tmp_path, monkeypatch):
    def pack(w):
        raise ValueError("rows must be a multiple of 64")

    monkeypatch.setitem(LAYOUTS, "picky", Layout(pack, lambda w: w))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \[32, 16\] cannot be stored as int8 .*multiple of 64"):
        plan_preparation(small, Options(layout="picky"))


def _entry(change):
    return lambda config: change(config[KEY])


@pytest.mark.parametrize(
    "change, message",
    [
        (_entry(lambda e: e.update(format=2)), "format 2"),
        (_entry(lambda e: e.update(prefix="x.")), "prefix 'x.'"),
        (_entry(lambda e: e.pop("weights")), "malformed"),
        (lambda config: config.update({KEY: 3}), "malformed"),
        (_entry(lambda e: e["weights"]["lm_head"].update(bits=3)), "'lm_head'.*bits=3"),
        (_entry(lambda e: e["weights"]["lm_head"].update(bits=4)), r"lm_head\.codes' has shape \[32, 16\].*\[32, 8\]"),
        (_entry(lambda e: e["weights"]["lm_head"].update(group=8)), r"lm_head\.scales' has shape \[32, 1\].*\[32, 2\]"),
        (_entry(lambda e: e["weights"]["lm_head"].update(group=7)), "do not divide"),
        (_entry(lambda e: e["weights"]["lm_head"].update(scales="float32")), r"lm_head\.scales' has dtype F16"),
        (_entry(lambda e: e["weights"].pop("lm_head")), "lm_head.*says nothing of it"),
        (
            _entry(lambda e: e["weights"].update({"linear.mlp.down": e["weights"]["lm_head"]})),
            r"linear\.0\.mlp\.down.*is stored as dense, but .*int8 group 16",
        ),
        (lambda config: config.pop(KEY), "of a prepared checkpoint, but config.json has no 'qwen38_jax'"),
    ],
)
def test_config_and_tensors_that_contradict_each_other(small, tmp_path, change, message):
    prepare(small, tmp_path / "m", Options())
    edit_json(tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "m")
    assert not describe(tmp_path / "m").loadable


def test_damage_to_scales_in_words_is_seen(synthetic, tmp_path):
    prepare(synthetic("w4a16"), tmp_path / "m")
    edit(tmp_path / "m", lambda t: t["full.0.mlp.down.scales"].fill(0x7E00), "full-000.safetensors")  # every second one
    with pytest.raises(CheckpointError, match=r"full\.0\.mlp\.down\.scales' holds nan"):
        load_checkpoint(tmp_path / "m")


def test_damage_to_a_prepared_checkpoint_is_seen(small, tmp_path):
    prepare(small, tmp_path / "m", Options())
    edit(tmp_path / "m", lambda t: t["lm_head.scales"].fill(np.nan), "lm_head.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.scales' holds nan"):
        load_checkpoint(tmp_path / "m")
    (tmp_path / "m" / "linear-001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"linear-001\.safetensors is missing"):
        load_checkpoint(tmp_path / "m")


# --- what is refused


def test_requests_that_make_no_sense(small, synthetic, tmp_path):
    for options, message in (
        ({"head": "int3"}, "head must be one of int8, int4, keep, got 'int3'"),
        ({"embedding": "int4"}, "embedding must be one of int8, keep"),
        ({"drafter_linears": "int8"}, "no drafter is given"),
    ):
        with pytest.raises(ValueError, match=message):
            Options(**options)
    with pytest.raises(CheckpointError, match="body is to be int8.*int4 group 128.*rounding twice"):
        plan_preparation(synthetic("w4a16"), Options(body="int8"))
    with pytest.raises(CheckpointError, match="head is to be int8, but the source has lm_head in int4"):
        plan_preparation(synthetic("fast"), Options(head="int8"))
    plan_preparation(synthetic("fast"), Options(head="int4", mtp="int4", body="int4"))  # as they are
    bare = make(tmp_path / "bare")
    edit_json(bare, lambda config: config.update(tie_word_embeddings=True))
    edit(bare, lambda t: [t.pop(name) for name in list(t) if name.startswith(("mtp.", "lm_head."))])
    (tmp_path / "ids.json").write_text("[1]")
    for options, message in (
        ({"mtp": "int4"}, "no MTP head"),
        ({"head": "int8"}, "the embedding is the head"),
        ({"draft_vocab": tmp_path / "ids.json"}, "draft vocabulary is for the MTP head"),
    ):
        with pytest.raises(CheckpointError, match=message):
            plan_preparation(bare, Options(**options))
    prepare(bare, tmp_path / "out", Options())
    assert load_checkpoint(tmp_path / "out").params.embed.bits == 8
    edit(bare, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="differs from"):
        plan_preparation(bare, Options())


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_source_and_destination_must_be_apart(tmp_path, where):
    source = make(tmp_path / "a" / "b")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="not apart"):
        prepare(source, source / where)
    assert contents(tmp_path) == before


def test_a_value_that_is_not_finite_is_found(small, tmp_path):
    source = make(tmp_path / "a")
    edit(source, lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 4), np.inf))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: a value is not finite"):
        prepare(source, tmp_path / "b", Options(body="int8"))
    assert not (tmp_path / "b").exists()


# --- the command


def test_the_command(synthetic, tmp_path, capsys):
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    out = tmp_path / "m"
    main([str(synthetic("w4a16")), str(out), "--head", "int4", "--draft-vocab", str(tmp_path / "ids.json")])
    printed = capsys.readouterr().out
    assert re.search(r"int4 group 128 \(compressed-tensors\) +int4 group 128 \(mma\) +0.00e\+00", printed)
    checkpoint = load_checkpoint(out)
    assert checkpoint.params.lm_head.bits == 4 and checkpoint.params.embed.bits == 8
    assert (out / DRAFT_IDS).exists() and not (tmp_path / ".m.unfinished").exists()
    with pytest.raises(SystemExit, match="m exists and is not an empty directory"):
        main([str(synthetic("w4a16")), str(out)])
    with pytest.raises(SystemExit, match="body is to be int8"):
        main([str(synthetic("w4a16")), str(tmp_path / "n"), "--body", "int8"])
    with pytest.raises(SystemExit, match="nowhere is not a directory"):
        main([str(tmp_path / "nowhere"), str(tmp_path / "n")])
    assert not (tmp_path / "n").exists()


def test_progress_adds_up(small, tmp_path):
    plan, steps = plan_preparation(small, Options()), []
    plan.run(tmp_path / "m", steps.append)
    assert sum(steps) == plan.nbytes and len(steps) > 5


def test_memory_is_that_of_one_shard(tmp_path):
    write(tmp_path / "a", recipe("qwen3.8-27b", scale="small", layers=24, vision=False))
    options = Options(body="int8", embedding="keep", head="keep", mtp="keep")
    prepare(tmp_path / "a", tmp_path / "b", options)  # compiles
    total = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors"))
    tracemalloc.start()
    prepare(tmp_path / "a", tmp_path / "c", options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 10e6 and peak < total / 3
