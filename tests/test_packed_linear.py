"""Products with matrices in the layout of the kernels: by the kernel, and without it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.block import chain_block
from qwen38_jax.checkpoint.synthetic import SMALL
from qwen38_jax.layers import linear as module
from qwen38_jax.layers.linear import linear, packed_linear
from qwen38_jax.model import forward, logits
from qwen38_jax.params import abstract, layer_at
from qwen38_jax.quantization import LAYOUTS, Indexed, RowBlocks, dequantize, is_quantised, quantize
from qwen38_jax.state import StateConfig, abstract_state
from tests.kernels.implementations import implementation, relative_rms

# One group of two layers, with inputs of every matrix in whole groups of 128.
CFG = dataclasses.replace(SMALL, num_hidden_layers=2, linear_per_group=1, mtp_num_hidden_layers=0, vocab_size=64)
BITS = {"gate_up": 4, "down": 4, "qkv": 4, "o": 4, "qkvz": 4, "out": 4, "lm_head": 8}


@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernel_and_jnp_agree(bits):
    w = LAYOUTS["mma"].pack(quantize(jax.random.normal(jax.random.key(0), (2, 65, 256)), bits, 128))
    x = jax.random.normal(jax.random.key(1), (3, 2, 256)).astype("bfloat16")
    run = implementation("interpret", functools.partial(packed_linear, out_dtype="float32"), None)
    for layer in range(2):
        y = run(x, w, layer)
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], w)
        exact = jnp.einsum("...k,nk->...n", x.astype("float32"), dequantize(one, "float32"), precision="highest")
        assert y.dtype == jnp.float32 and relative_rms(y, exact) < 1e-6
        # Without the kernel the matrix is rounded to the dtype of x.
        assert relative_rms(linear(x, Indexed(w, layer), "float32"), exact) < 5e-3
        np.testing.assert_array_equal(linear(x, Indexed(w, layer)), linear(x, one))
    assert linear(x, one).dtype == jnp.bfloat16 == run(x, w, 0).astype(x.dtype).dtype


def test_the_model_calls_a_kernel_for_every_matrix_and_cuts_nothing_out_of_a_stack(monkeypatch):
    monkeypatch.setattr(module, "takes_kernels", lambda mode, dtype: True)

    def pack(path, info):
        leaf = jnp.ones(info.shape, info.dtype)
        bits = BITS.get(path[-1].name)
        return leaf if bits is None else LAYOUTS["mma"].pack(quantize(leaf, bits, 128))

    def score(params, tokens, state):
        hidden, _, _ = forward(params, CFG, chain_block(tokens, state.lengths), state, commit=True)
        return logits(params, hidden)

    params = jax.eval_shape(lambda: jax.tree_util.tree_map_with_path(pack, abstract(CFG)))
    state = abstract_state(CFG, StateConfig(batch=1, capacity=64))
    tokens = jax.ShapeDtypeStruct((1, 5), jnp.int32)
    operations = list(_operations(jax.make_jaxpr(score)(params, tokens, state).jaxpr))
    calls = [operation for operation in operations if operation.primitive.name == "pallas_call"]
    assert len(calls) == 9  # four matrices of either kind of layer, and the head
    stacks = {w.codes.size for w in jax.tree.leaves(params, is_leaf=is_quantised) if is_quantised(w)}
    assert {call.invars[2].aval.size for call in calls} == stacks
    for operation in operations:
        if operation.primitive.name in ("dynamic_slice", "gather", "slice"):
            source = operation.invars[0].aval
            assert source.dtype != jnp.int32 or source.size not in stacks


def _operations(jaxpr):
    """All of a program's, but for what kernels are made of."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns") and equation.primitive.name != "pallas_call":
                yield from _operations(value)


def test_blocks_of_rows_are_each_found_in_their_stack():
    blocks = tuple(
        quantize(jax.random.normal(jax.random.key(i), (2, 64, 128)), bits, 128) for i, bits in ((0, 4), (1, 8))
    )
    packed = RowBlocks(tuple(LAYOUTS["mma"].pack(block) for block in blocks))
    x = jax.random.normal(jax.random.key(2), (1, 128))
    layer = layer_at(packed, jnp.int32(1))
    assert all(isinstance(block, Indexed) for block in layer.blocks)
    np.testing.assert_array_equal(linear(x, layer), linear(x, jax.tree.map(lambda leaf: leaf[1], RowBlocks(blocks))))
