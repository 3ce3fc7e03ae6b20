"""Trained heads go into a copy of a checkpoint: nothing else changes there, and nothing at all in the source."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.checkpoint import CheckpointError, export_drafter, load_checkpoint, load_drafter
from qwen38_jax.checkpoint.mtp_file import read_mtp, replace_mtp, write_mtp
from qwen38_jax.checkpoint.synthetic.dflash2 import SMALL as SMALL_DRAFTER
from qwen38_jax.params import abstract, abstract_dflash2, init_tree
from qwen38_jax.quantization import is_quantised, quantize
from scripts.export_checkpoint import main
from tests.checkpoint.small import CFG, make, read


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "source", shards=True)


def head(cfg=CFG, seed=1):
    infos = abstract(dataclasses.replace(cfg, dtype="float32")).mtp
    return jax.tree.map(lambda p: p + 0.5, init_tree(infos, jax.random.key(seed)))


def digests(directory):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir() if p.is_file()}


def test_only_the_heads_tensors_change(source, tmp_path, capsys):
    before = digests(source)
    write_mtp(tmp_path / "mtp.safetensors", head(), CFG)
    main([str(source), str(tmp_path / "new"), "--mtp", str(tmp_path / "mtp.safetensors")])
    assert digests(source) == before
    old, new = read(source), read(tmp_path / "new")
    assert old.keys() == new.keys()
    for name in old:
        assert old[name].dtype == new[name].dtype and old[name].shape == new[name].shape
        assert (old[name].tobytes() == new[name].tobytes()) == (not name.startswith("mtp.")), name
    loaded = load_checkpoint(tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, loaded.params.mtp, head())
    np.testing.assert_array_equal(loaded.params.embed, load_checkpoint(source).params.embed)
    assert json.loads(capsys.readouterr().out)["mtp"]["replaced"] == sum(n.startswith("mtp.") for n in old)
    unchanged = {n for n, d in digests(tmp_path / "new").items() if d == before[n]}
    assert {"config.json", "generation_config.json"} <= unchanged


def test_the_file_of_a_head_comes_back(tmp_path):
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    write_mtp(tmp_path / "mtp.safetensors", head(), cfg)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)),
        read_mtp(tmp_path / "mtp.safetensors", cfg),
        head(),
    )


def test_a_head_of_another_model_or_dtype_is_refused(source, tmp_path):
    wide = dataclasses.replace(CFG, intermediate_size=64)
    for cfg, message in ((wide, "not F32"), (dataclasses.replace(CFG, dtype="bfloat16"), "not BF16")):
        write_mtp(tmp_path / "mtp.safetensors", head(cfg), cfg)
        with pytest.raises(CheckpointError, match=message):
            replace_mtp(source, tmp_path / "new", tmp_path / "mtp.safetensors")
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match="lacks"):
        read_mtp(min(source.glob("*.safetensors")), CFG)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_drafter_comes_back(tmp_path, quantised):
    cfg = dataclasses.replace(SMALL_DRAFTER, vocab_size=64, mask_token_id=63, dtype="float32")
    params = init_tree(abstract_dflash2(cfg), jax.random.key(0))
    if quantised:
        mlp = params.layers.mlp
        params = params.replace(fc=quantize(params.fc, 4, 128))
        layers = params.layers.replace(mlp=mlp.replace(down=quantize(mlp.down, 4, 128)))
        params = params.replace(layers=layers)
    export_drafter(tmp_path / "drafter", params, cfg)
    loaded, found = load_drafter(tmp_path / "drafter")
    assert found == cfg
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert any(map(is_quantised, jax.tree.leaves(loaded, is_leaf=is_quantised))) == quantised
    names = set(read(tmp_path / "drafter"))
    assert "candidate_selector.predecessor_codebook" in names and "layers.1.attention_conv.base_kernel" in names


def test_a_drafter_goes_beside_its_model_only(source, tmp_path):
    cfg = dataclasses.replace(
        SMALL_DRAFTER, vocab_size=32, hidden_size=16, num_target_layers=4, target_layer_ids=(1, 3), mask_token_id=31
    )
    export_drafter(tmp_path / "drafter", init_tree(abstract_dflash2(cfg), jax.random.key(0)), cfg)
    main([str(source), str(tmp_path / "new"), "--drafter", str(tmp_path / "drafter")])
    assert load_drafter(tmp_path / "new" / "drafter")[1] == cfg
    assert read(tmp_path / "new").keys() == read(source).keys()
    other = make(tmp_path / "other", num_hidden_layers=8)
    with pytest.raises(SystemExit, match="is another"):
        main([str(other), str(tmp_path / "new2"), "--drafter", str(tmp_path / "drafter")])
    assert not (tmp_path / "new2").exists()
