import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from qwen38_jax.layers.linear import embed, linear
from qwen38_jax.quantization import QuantTensor, dequantize, quant_tensor, quantize
from qwen38_jax.quantization.tensor import pack, unpack
from tests.golden import GOLDEN, needs_golden


@needs_golden
@pytest.mark.parametrize("bits", [4, 8])
def test_the_published_packing_dequantises_exactly(bits):
    golden = {k[3:]: v for k, v in load_file(GOLDEN / "w4a16_sample.safetensors").items() if k.startswith(f"w{bits}")}
    codes = jnp.asarray(golden["weight_packed"].view(np.uint8))
    w = quant_tensor(codes, jnp.asarray(golden["weight_scale"]), bits=bits, dtype="float32")
    assert w.shape == tuple(golden["weight_shape"]) and w.group == 128
    np.testing.assert_array_equal(unpack(w.codes, bits), golden["codes"])
    np.testing.assert_array_equal(dequantize(w), golden["dequant_f32"])
    assert set(np.unique(golden["codes"])) >= {-(2 ** (bits - 1)), 2 ** (bits - 1) - 1}


def _random(bits, n=6, k=32, group=8, *, zeros=False, order=False, stack=(), seed=0):
    """A `QuantTensor` with every kind of code and sign, and the matrix it stands for in float64."""
    rng = np.random.default_rng(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = rng.integers(low, high, (*stack, n, k))
    codes[..., 0, :2] = low, high - 1
    scales = rng.normal(size=(*stack, n, k // group)).astype(np.float16)
    zero = rng.integers(low, high, scales.shape) if zeros else np.zeros(scales.shape, int)
    if zeros:
        zero[..., 0, 0] = high - 1  # code less zero needs one bit more
    group_of = np.arange(k) // group
    if order:
        group_of = np.stack([rng.permutation(group_of) for _ in range(int(np.prod(stack)))]).reshape(*stack, k)
    index = np.broadcast_to(group_of[..., None, :], codes.shape)
    steps = codes - np.take_along_axis(zero, index, -1)
    matrix = steps * np.take_along_axis(scales, index, -1).astype(np.float64)
    w = quant_tensor(
        pack(jnp.asarray(codes, jnp.int8), bits),
        jnp.asarray(scales),
        jnp.asarray(zero, jnp.int8) if zeros else None,
        jnp.asarray(group_of, jnp.int32) if order else None,
        bits=bits,
        dtype="float32",
    )
    return w, matrix


KINDS = [dict(bits=bits, zeros=zeros, order=order) for bits in (4, 8) for zeros in (0, 1) for order in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", [(), (3,)])
def test_dequantise_is_code_less_zero_times_scale(kind, stack):
    w, matrix = _random(**kind, stack=stack)
    assert w.shape == matrix.shape
    np.testing.assert_array_equal(dequantize(w), matrix.astype(np.float32))
    np.testing.assert_array_equal(dequantize(w, jnp.bfloat16), matrix.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_of_a_stack_is_selected_by_indexing_leaves(kind):
    w, matrix = _random(**kind, stack=(3,))
    layer = jax.jit(lambda w, i: dequantize(jax.tree.map(lambda t: t[i], w)))(w, 2)
    np.testing.assert_array_equal(layer, matrix[2].astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_linear_and_embed_equal_those_of_the_dequantised_matrix(kind):
    w, _ = _random(**kind)
    x = jax.random.normal(jax.random.key(0), (2, 3, 32))
    np.testing.assert_array_equal(linear(x, w), linear(x, dequantize(w)))
    half = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(linear(half, w), linear(half, dequantize(w, "bfloat16")))
    ids = jnp.array([[0, 5, 9], [2, 2, 1]])  # 9 is clamped
    np.testing.assert_array_equal(embed(w, ids), embed(dequantize(w), ids))
    assert embed(w.astype("bfloat16"), ids).dtype == jnp.bfloat16


def test_embed_dequantises_only_the_rows_it_needs():
    table = quantize(jax.random.normal(jax.random.key(0), (5000, 64)), 8, 32)
    text = jax.jit(embed).lower(table, jnp.zeros((1, 4), jnp.int32)).as_text()
    assert "5000x64xui8" in text and "5000x64xf32" not in text


@pytest.mark.parametrize("bits, nbytes", [(4, 256 * 512 // 2 + 256 * 4 * 2), (8, 256 * 512 + 256 * 4 * 2)])
def test_it_takes_the_bytes_of_its_codes_and_scales(bits, nbytes):
    assert quantize(jnp.ones((256, 512)), bits, 128).nbytes == nbytes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pack_and_unpack_are_inverse(data):
    bits = data.draw(st.sampled_from([4, 8]))
    rows = data.draw(st.sampled_from([1, 3]))  # few shapes: each is compiled
    code = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    codes = np.array(data.draw(st.lists(code, min_size=8 * rows, max_size=8 * rows)), np.int8).reshape(rows, 8)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.dtype == jnp.uint8 and packed.shape == (rows, bits)
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rounding_errs_by_half_a_step(data):
    bits, group = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([2, 8, 16, None]))
    symmetric = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    w = (rng.normal(size=(5, 16)) * 10.0 ** rng.integers(-3, 3, (5, 1)) + rng.normal()).astype(np.float32)
    w[0] = 0
    q = quantize(jnp.asarray(w), bits, group, symmetric=symmetric, scale_dtype="float32")
    got = np.asarray(dequantize(q))
    step = np.abs(np.repeat(np.asarray(q.scales), q.group, axis=1))
    # Symmetric: the largest magnitude of the sign opposite to code -8 is up to one step beyond the last code.
    # Asymmetric: rounding the zero point may push an end of the range half a step out.
    assert (np.abs(got - w) <= step * (1 + 1e-3)).all()
    codes = np.asarray(unpack(q.codes, bits))
    inside = (codes > -(2 ** (bits - 1))) & (codes < 2 ** (bits - 1) - 1)
    assert (np.abs(got - w) <= step * (0.5 + 1e-3))[inside].all()
    assert (got[0] == 0).all() and np.isfinite(got).all()
    # What is on the grid already stays where it is.
    np.testing.assert_allclose(
        dequantize(quantize(dequantize(q), bits, group, symmetric=symmetric, scale_dtype="float32")),
        got,
        atol=0.51 * step.max(),
    )


def test_the_largest_magnitude_takes_the_lowest_code_whatever_its_sign():
    w = jnp.array([[0.5, -1.0, 2.0, 0.0], [0.5, 1.0, -2.0, 0.0]])
    q = quantize(w, 4, None)
    np.testing.assert_array_equal(q.scales, [[-0.25], [0.25]])
    np.testing.assert_array_equal(unpack(q.codes, 4), [[-2, 4, -8, 0], [2, 4, -8, 0]])
    np.testing.assert_array_equal(dequantize(q), w)


def test_quantise_may_be_traced_and_stacked():
    w = jax.random.normal(jax.random.key(1), (3, 4, 16))
    q = jax.jit(quantize, static_argnums=(1, 2))(w, 4, 8)
    assert isinstance(q, QuantTensor) and q.shape == w.shape and (q.bits, q.group, q.layout) == (4, 8, "rows")
    one = quantize(w[1], 4, 8)
    np.testing.assert_array_equal(q.codes[1], one.codes)


U8, F16, I8 = (lambda *shape, t=t: jnp.zeros(shape, t) for t in (jnp.uint8, jnp.float16, jnp.int8))


@pytest.mark.parametrize(
    "arguments, changes, words",
    [
        ((U8(4, 8), F16(4, 3)), {}, ["[4, 3]", "[4, 8]", "[4, 16]", "whole groups"]),
        ((U8(4, 8), F16(5, 2)), {}, ["[5, 2]", "[4, 8]"]),
        ((U8(4, 8), F16(4, 2)), {"bits": 3}, ["4 or 8", "3"]),
        ((I8(4, 8), F16(4, 2)), {}, ["uint8", "int8[4, 8]"]),
        ((U8(4, 8), I8(4, 2)), {}, ["scales", "int8"]),
        ((U8(4, 8), F16(4, 2), I8(4, 1)), {}, ["int8[4, 2]", "int8[4, 1]"]),
        ((U8(4, 8), F16(4, 2), F16(4, 2)), {}, ["int8[4, 2]", "float16[4, 2]"]),
        ((U8(4, 8), F16(4, 2), None, jnp.zeros(8, jnp.int32)), {}, ["int32[16]", "int32[8]"]),
    ],
)
def test_parts_that_do_not_fit_are_told_with_both_facts(arguments, changes, words):
    with pytest.raises(ValueError) as raised:
        quant_tensor(*arguments, **{"bits": 4, "dtype": "float32", **changes})
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("bits, group, words", [(4, 5, "groups of 5"), (4, 0, "groups of 0"), (2, 8, "got 2")])
def test_what_cannot_be_quantised(bits, group, words):
    with pytest.raises(ValueError, match=words):
        quantize(jnp.ones((2, 16)), bits, group)
