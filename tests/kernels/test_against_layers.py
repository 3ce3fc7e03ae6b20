"""The references say the same as the model's own layers, which the kernels are to stand in for."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_net import Pending, Rows, verify_gated_delta_net_reference
from pallas_kernels.int4_matmul import dequantize_int4, pack_int4
from pallas_kernels.int8_matmul import dequantize_int8, pack_int8
from pallas_kernels.verify_attention import PagedCache, verify_attention_reference
from qwen38_jax.block import Block, visible
from qwen38_jax.layers import attention
from qwen38_jax.layers.gated_delta_net import Inputs, Writes, delta_rule, keep_rows
from qwen38_jax.quantization.tensor import dequantize, quantize

PARENTS = jnp.array([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 3, 4]])


def tree_block():
    valid = jnp.ones(PARENTS.shape, bool).at[1, 5].set(False)
    return Block(jnp.zeros_like(PARENTS), jnp.zeros_like(PARENTS), valid, PARENTS)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_gated_delta_net():
    block, (batch, n) = tree_block(), PARENTS.shape
    mask = visible(block)
    inputs = Inputs(
        normal(0, batch, n, 1, 16) / 16,
        normal(1, batch, n, 1, 16) / 4,
        normal(2, batch, n, 3, 16),
        -jnp.exp(normal(3, batch, n, 3)),
        jax.nn.sigmoid(normal(4, batch, n, 3)),
    )
    inputs = Inputs(*(jnp.where(block.valid.reshape(batch, n, *[1] * (t.ndim - 2)), t, 0.0) for t in inputs))
    writes = Writes(normal(5, batch, 4, 1, 16), normal(6, batch, 4, 3, 16), -jnp.exp(normal(7, batch, 4, 3)), None)
    path = jnp.array([[True, True, False, True], [False] * 4])
    state = normal(8, 1, batch, 3, 16, 16)
    pending = Pending(*(t[None] for t in writes[:3]))

    @jax.jit
    def both():
        settled = keep_rows(state[0], writes, path)
        verified = verify_gated_delta_net_reference(Rows(*inputs), mask, state, 0, pending, path)
        return settled, delta_rule(inputs, settled, block)[:3], verified

    settled, expected, verified = both()
    np.testing.assert_allclose(verified.state[0], settled, atol=1e-5)
    for ours, theirs in zip(verified[:3], expected, strict=True):
        np.testing.assert_allclose(ours[block.valid], theirs[block.valid], atol=2e-5)


def test_attention():
    block, (batch, n) = tree_block(), PARENTS.shape
    mask = visible(block)
    q, k, v = (normal(i, batch, n, heads, 32).astype(jnp.bfloat16) for i, heads in enumerate((6, 2, 2)))
    pools = [normal(i, 2, 5, 16, 2, 32).astype(jnp.bfloat16) for i in (3, 4)]
    table, lengths = jnp.array([[3, 1], [0, 4]]), jnp.array([20, 16])
    rows = attention.Rows(*(t.astype(jnp.float32) for t in (q, q, k, v)))
    context = attention.Context(*(p.astype(jnp.float32) for p in pools), 1, table, lengths)

    @jax.jit
    def both():
        ours = verify_attention_reference(q, k, v, mask, PagedCache(*pools), 1, table, lengths, out_dtype="float32")
        return ours, attention.attend(rows, mask, context)

    ours, expected = both()
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_quantised_matrices():
    matrix = normal(9, 40, 256)
    for bits, pack, ours in ((4, pack_int4, dequantize_int4), (8, pack_int8, dequantize_int8)):
        quantised = quantize(matrix, bits, 128)
        expected = dequantize(quantised, "float32")
        np.testing.assert_array_equal(ours(pack(quantised.codes, quantised.scales), jnp.float32), expected)
