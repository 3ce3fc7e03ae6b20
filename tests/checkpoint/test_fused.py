"""Matrices that share an input and load as one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.layers.linear import linear
from qwen38_jax.quantization import QuantTensor, RowBlocks, dequantize, quantize
from tests.checkpoint.packing import compressed, gptq, load_fused, random_matrix

N, K = 16, 64
X = jax.random.normal(jax.random.key(0), (2, 3, K))


def matrices(*kinds, layers=2):
    """Slices of some layers each; a kind is a dict of `random_matrix`'s arguments."""
    return [[random_matrix(N, K, seed=10 * i + j, **kind) for j in range(layers)] for i, kind in enumerate(kinds)]


def expected(slices):
    return np.stack([np.concatenate([m.matrix for m in layer]) for layer in zip(*slices, strict=True)])


def load(tmp_path, slices, write=compressed):
    return load_fused(tmp_path, *[[write(m) for m in layers] for layers in slices], shape=(N, K))


def check(w, slices):
    """Shape, values, and the product with one layer of the stack, which is what the forward pass computes."""
    want = expected(slices)
    assert w.shape == want.shape and w.dtype == "float32"
    np.testing.assert_array_equal(dequantize(w), want)
    layer = jax.tree.map(lambda t: t[1], w)
    np.testing.assert_allclose(linear(X, layer), X @ want[1].T, atol=1e-4)
    np.testing.assert_allclose(linear(X, layer, jnp.bfloat16), (X @ want[1].T).astype(jnp.bfloat16), atol=0.5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_slices_of_one_format_are_one_matrix(tmp_path, symmetric):
    slices = matrices({"groups": 4, "symmetric": symmetric}, {"groups": 4}, {"groups": 4, "dtype": "bfloat16"})
    w = load(tmp_path, slices, lambda m: compressed(m, zeros=bool((m.z != 8).any())))
    assert isinstance(w, QuantTensor) and w.scales.dtype == "float32"
    assert (w.zeros is None) == symmetric
    check(w, slices)


def test_columns_in_one_order_are_one_matrix(tmp_path):
    """What a GPTQ quantiser writes: slices see the same inputs, and so take their columns in the same order."""
    slices = matrices({"groups": 4, "order": True}, {"groups": 4})
    for ordered, other in zip(*slices, strict=True):
        other.g_idx = ordered.g_idx
        other.matrix = (other.u - 8) * other.s[:, other.g_idx].astype(np.float32)
    w = load(tmp_path, slices, gptq)
    assert isinstance(w, QuantTensor) and w.group_of.shape == (2, K)
    check(w, slices)


@pytest.mark.parametrize(
    "other",
    [{"groups": 4, "bits": 8}, {"groups": 2}, {"groups": 4, "order": True}],
    ids=["bits", "group", "order"],
)
def test_slices_stored_differently_stay_apart(tmp_path, other):
    slices = matrices({"groups": 4}, other)
    w = load(tmp_path, slices, gptq if "order" in other else compressed)
    assert isinstance(w, RowBlocks) and [block.shape for block in w.blocks] == [(2, N, K)] * 2
    assert w.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(w))
    check(w, slices)


def test_floats_beside_integers(tmp_path):
    slices = matrices({"groups": 4}, {"groups": 4})
    w = load_fused(
        tmp_path, [compressed(m) for m in slices[0]], [{"weight": m.matrix} for m in slices[1]], shape=(N, K)
    )
    assert isinstance(w.blocks[0], QuantTensor) and isinstance(w.blocks[1], jax.Array)
    check(w, slices)
    half = w.astype("bfloat16")
    assert half.dtype == "bfloat16" and half.blocks[1].dtype == jnp.bfloat16 and half.blocks[0].codes.dtype == "uint8"


@pytest.mark.parametrize("chunk_rows", [1, 3, 16, 20, 100])
def test_pieces_may_end_anywhere(tmp_path, monkeypatch, chunk_rows):
    monkeypatch.setattr("qwen38_jax.checkpoint.unpack.CHUNK_BYTES", 4 * (K // 2) * chunk_rows)
    slices = matrices({"groups": 4}, {"groups": 4}, {"groups": 4})
    check(load(tmp_path, slices), slices)


def test_the_gradient_of_inputs_passes_through_blocks():
    dense = jax.random.normal(jax.random.key(1), (8, K))
    w = RowBlocks((quantize(dense, 8, 16), dense))
    got = jax.grad(lambda x: linear(x, w).sum())(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: (x @ dequantize(w).T).sum())(X), atol=1e-4)
