"""Quantised parameters written and read back: by this package and by the libraries that define the format."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.checkpoint import export_checkpoint, load_checkpoint
from qwen38_jax.checkpoint.synthetic import recipe, write
from qwen38_jax.params import DraftHead, Params
from qwen38_jax.quantization import QuantTensor, RowBlocks, dequantize, is_quantised, quantize
from tests.checkpoint.small import CFG, assert_same, make, read

# (bits, group, symmetric) of each leaf, so that every combination occurs in one model; groups divide 16 and 32.
KINDS = [(bits, group, symmetric) for bits in (4, 8) for group in (8, None) for symmetric in (True, False)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return load_checkpoint(make(tmp_path_factory.mktemp("dense") / "m")).params


@pytest.fixture(scope="module")
def params(dense):
    return quantised(dense)


@jax.jit
def quantised(params: Params) -> Params:
    """Every matrix quantised, each in the next of `KINDS`; those of attention slice by slice, the keys left alone."""
    leaves, treedef = jax.tree.flatten(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    kinds = iter(2 * KINDS)
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if path == ".full.mixer.qkv":
            q, k, v = jnp.split(leaf, [64, 80], axis=-2)
            leaves[i] = RowBlocks((quantize(q, 4, 8), k, quantize(v, 8, 16, scale_dtype="bfloat16")))
        elif leaf.ndim >= 2 and "norm" not in path and not path.endswith((".conv", ".A_log", ".dt_bias", ".ba")):
            bits, group, symmetric = next(kinds)
            leaves[i] = quantize(leaf, bits, group, symmetric=symmetric)
    return jax.tree.unflatten(treedef, leaves)


@jax.jit
def as_dense(params: Params) -> Params:
    return jax.tree.map(dequantize, params, is_leaf=is_quantised)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_every_kind_of_integers_comes_back_bit_for_bit(dense, params, tmp_path, prefix):
    head = DraftHead(quantize(dense.lm_head[::3], 4, 8), jnp.arange(0, CFG.vocab_size, 3, dtype=jnp.int32))
    export_checkpoint(tmp_path / "m", params, CFG, draft_head=head, prefix=prefix, shard_bytes=20_000)
    again = load_checkpoint(tmp_path / "m")
    assert again.prefix == prefix and again.notes == ()
    assert_same(again.params, params)
    assert_same(again.draft_head, head)
    weights = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantised) if isinstance(leaf, QuantTensor)]
    assert len({(w.bits, w.scales.shape[-1] == 1, w.zeros is None) for w in weights}) == len(KINDS)


@pytest.mark.parametrize("name", ["w4a16", "fast", "gptq", "gptq-act-order"])
def test_what_is_loaded_quantised_comes_back(tmp_path, name):
    write(tmp_path / "a", recipe(f"qwen3.8-27b-{name}", scale="small", layers=4, vision=False))
    first = load_checkpoint(tmp_path / "a")
    export_checkpoint(
        tmp_path / "b",
        first.params,
        first.cfg,
        draft_head=first.draft_head,
        hf_config=first.hf_config,
        prefix=first.prefix,
    )
    again = load_checkpoint(tmp_path / "b")
    assert_same((again.params, again.draft_head), (first.params, first.draft_head))
    if not name.startswith("gptq"):  # the source is in this format already
        got, want = read(tmp_path / "b"), read(tmp_path / "a")
        assert got.keys() == want.keys()
        for tensor in want:
            np.testing.assert_array_equal(got[tensor], want[tensor], err_msg=tensor, strict=True)


def test_the_config_names_each_matrix_once(params, tmp_path):
    export_checkpoint(tmp_path / "m", params, CFG)
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    tensors = read(tmp_path / "m")
    targets = [target for group in config["config_groups"].values() for target in group["targets"]]
    assert sorted(targets) == sorted(n.removesuffix(".weight_packed") for n in tensors if n.endswith("weight_packed"))
    assert len(set(targets)) == len(targets)
    for group in config["config_groups"].values():
        weights = group["weights"]
        for target in group["targets"]:
            n, k = tensors[f"{target}.weight_shape"]
            groups = tensors[f"{target}.weight_scale"].shape[1]
            assert (weights["strategy"] == "channel") == (groups == 1)
            assert weights.get("group_size", k) == k // groups
            assert weights["num_bits"] == tensors[f"{target}.weight_packed"].shape[1] * 32 // k
            assert weights["symmetric"] == (f"{target}.weight_zero_point" not in tensors)
    assert "model.layers.0.linear_attn.in_proj_a" in config["ignore"] and not {*config["ignore"]} & {*targets}
    export_checkpoint(tmp_path / "dense", as_dense(params), CFG, hf_config={**CFG.to_hf(), "quantization_config": {}})
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_contradictions_are_errors_that_write_nothing(dense, params, tmp_path):
    out = tmp_path / "m"
    with pytest.raises(ValueError, match=r"params\.lm_head is bfloat16"):
        export_checkpoint(out, params.replace(lm_head=params.lm_head.astype("bfloat16")), CFG)
    mixer = params.full.mixer.replace(qkv=RowBlocks(tuple(jnp.split(dense.full.mixer.qkv, [70], axis=-2))))
    with pytest.raises(ValueError, match=r"params\.full\.mixer\.qkv has a block that ends within rows 64 to 80"):
        export_checkpoint(out, params.replace(full=params.full.replace(mixer=mixer)), CFG)
    conv = quantize(dense.linear.mixer.conv, 8, None)
    mixer = params.linear.mixer.replace(conv=conv)
    with pytest.raises(ValueError, match=r"linear\.mixer\.conv is quantised, but \[.*, 1, 4\] is no matrix"):
        export_checkpoint(out, params.replace(linear=params.linear.replace(mixer=mixer)), CFG)
    head = DraftHead(dense.lm_head[:3], jnp.array([0, 5, CFG.vocab_size]))
    with pytest.raises(ValueError, match=r"draft_head\.ids must ascend and be below 32"):
        export_checkpoint(out, params, CFG, draft_head=head)
    head = DraftHead(dense.lm_head[:3], jnp.array([0, 5]))
    with pytest.raises(ValueError, match=r"draft_head is float32\[3, 16\], cfg makes it float32\[2, 16\]"):
        export_checkpoint(out, params, CFG, draft_head=head)
    assert not out.exists()


@pytest.mark.slow
def test_compressed_tensors_reads_an_export(params, tmp_path):
    """Each matrix as that library decompresses it under the config's own scheme."""
    torch = pytest.importorskip("torch", reason="the parity extra is not installed")
    pytest.importorskip("compressed_tensors", reason="the parity extra is not installed")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    export_checkpoint(tmp_path / "q", params, CFG)
    export_checkpoint(tmp_path / "d", as_dense(params), CFG)
    want, tensors = read(tmp_path / "d"), read(tmp_path / "q")
    config = QuantizationConfig(**json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"])
    compared = 0
    for group in config.config_groups.values():
        for target in group.targets:
            own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(target + ".")}
            own["weight_scale"] = own["weight_scale"].astype(np.float32)  # or they would round their product
            own = {part: torch.tensor(t) for part, t in own.items()}
            got = PackedQuantizationCompressor.decompress(own, group)["weight"]
            np.testing.assert_array_equal(got.numpy(), want[f"{target}.weight"], err_msg=target)
            compared += 1
    assert compared == sum(name.endswith("weight_packed") for name in tensors) > 20


@pytest.mark.slow
def test_transformers_runs_an_export(dense, params, tmp_path):
    """Symmetric linears: transformers 5.24 fails on any quantised embedding, and expects zero points unpacked."""
    torch = pytest.importorskip("torch", reason="the parity extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")
    pytest.importorskip("compressed_tensors", reason="the parity extra is not installed")
    mlp = dense.linear.mlp
    symmetric = dense.replace(
        lm_head=quantize(dense.lm_head, 4, None),
        linear=dense.linear.replace(mlp=mlp.replace(gate_up=quantize(mlp.gate_up, 4, 8))),
        full=dense.full.replace(mixer=params.full.mixer.replace(o=quantize(dense.full.mixer.o, 8, 16))),
    )
    export_checkpoint(tmp_path / "q", symmetric, CFG)
    export_checkpoint(tmp_path / "d", as_dense(symmetric), CFG)
    rows = []
    for path in (tmp_path / "q", tmp_path / "d"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"] and not report["mismatched_keys"]
        with torch.no_grad():
            rows.append(model(input_ids=torch.arange(CFG.vocab_size)[None]).logits.numpy())
    assert 0.1 < np.std(rows[1]) < 10
    # The library rounds the product of code and scale to the dtype of the scale.
    np.testing.assert_allclose(*rows, atol=2e-2)
