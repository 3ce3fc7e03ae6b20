import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200, RTX_3090
from pallas_kernels.int4_matmul import (
    Config,
    heuristics,
    int4_matmul,
    int4_matmul_reference,
    pack_int4,
    unpack_int4,
)
from pallas_kernels.shapes import MATMULS, VERIFY_ROWS
from tests.kernels.implementations import IMPLEMENTATIONS, implementation, relative_rms

# Rows, channels, columns, and programs. Row tiles hold 8, units 64 x 128, programs up to 32 rows and 4 warps.
SHAPES = {
    "one row, one channel, one unit for nine programs": (1, 1, 128, 9),
    "a row more than a tile, a channel less than a block, two warps": (9, 63, 256, 2),
    "three tiles of rows, a block shared by four programs": (17, 65, 512, 7),
    "a row more than a program takes": (33, 64, 256, 3),
}


def matrix(rng, n, k, scale_dtype="float16", stack=()):
    """Bytes that hold every pair of codes, scales of either sign, and the float64 matrix that they stand for."""
    codes = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), (*stack, n, k // 2)).reshape(-1))
    codes = codes.reshape(*stack, n, k // 2)
    scales = rng.uniform(0.002, 0.02, (*stack, n, k // 128)) * rng.choice([-1, 1], (*stack, n, k // 128))
    scales = jnp.asarray(scales, scale_dtype)
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*stack, n, k).astype(np.float64) - 8
    return codes, scales, values * np.repeat(np.asarray(scales, np.float64), 128, axis=-1)


def multiplier(name, config=None):
    """`(x, weight, layer) -> fp32`."""
    options = {} if config is None else {"config": config}
    in_fp32 = functools.partial(int4_matmul, out_dtype="float32")
    return implementation(name, in_fp32, functools.partial(int4_matmul_reference, out_dtype="float32"), **options)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_float64(name, shape):
    m, n, k, programs = shape
    rng = np.random.default_rng(sum(shape))
    x_dtype, scale_dtype = [("bfloat16", "float16"), ("float16", "bfloat16"), ("bfloat16", "bfloat16")][m % 3]
    codes, scales, expected = matrix(rng, n, k, scale_dtype)
    weight = pack_int4(codes, scales)
    x = jnp.asarray(rng.normal(size=(m, k)), x_dtype)
    multiply = multiplier(name, Config(heuristics((m, n, k), RTX_3090).warps, programs))
    y = multiply(x, weight)
    assert relative_rms(y, np.asarray(x, np.float64) @ expected.T) < 3e-7

    # A row that holds anything, as padding may, changes no other.
    dirty = multiply(x.at[-1].set(jnp.nan), weight)
    np.testing.assert_array_equal(dirty[:-1], y[:-1])
    assert np.isnan(dirty[-1]).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_dequantises_exactly_and_finds_the_layer(name):
    """A row of the identity picks a column: the code times the scale, with no rounding at all."""
    n, k, layers = 191, 640, 3
    codes, scales, expected = matrix(np.random.default_rng(0), n, k, stack=(layers,))
    weight = pack_int4(codes, scales)
    assert set(codes.reshape(-1)) == set(range(256))
    multiply = multiplier(name, Config(1, 4))
    for layer in range(layers):
        for first in range(0, k, 32):
            rows = jnp.eye(32, k, first, dtype=jnp.bfloat16)
            np.testing.assert_array_equal(multiply(rows, weight, layer), expected[layer, :, first : first + 32].T)


def test_many_rows_take_an_ordinary_product():
    rng = np.random.default_rng(3)
    codes, scales, expected = matrix(rng, 65, 256)
    x = jnp.asarray(rng.normal(size=(129, 256)), jnp.bfloat16)
    y = jax.jit(int4_matmul)(x, pack_int4(codes, scales))
    assert y.dtype == jnp.bfloat16
    # The matrix is rounded to bf16, the products are not.
    assert relative_rms(y, np.asarray(x, np.float64) @ expected.T) < 4e-3


@pytest.mark.parametrize("n", [1, 63, 64, 65, 191])
def test_unpacking_undoes_packing(n):
    codes, scales, _ = matrix(np.random.default_rng(n), n, 384, "bfloat16", stack=(2,))
    weight = pack_int4(codes, scales)
    assert weight.n == n and weight.k == 384 and weight.stack == (2,)
    for packed, original in zip(unpack_int4(weight), (codes, scales), strict=True):
        np.testing.assert_array_equal(packed, original)


def test_the_padding_of_a_block_is_zero():
    codes, scales, _ = matrix(np.random.default_rng(4), 65, 128)
    weight = pack_int4(codes, scales)
    whole, _ = unpack_int4(type(weight)(weight.words, weight.scales, 128, weight.scale_dtype))
    assert (np.asarray(whole)[65:] == 0x88).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(codes=np.zeros((4, 60), np.uint8)), "K a multiple of 128"),
        (dict(codes=np.zeros((4, 64), np.int8)), "codes must be uint8"),
        (dict(scales=np.ones((4, 1), np.float32)), "float16 or bfloat16, got float32"),
        (dict(scales=np.ones((4, 2), np.float16)), r"scales must be \[4, 1\]"),
        (dict(scales=np.ones((5, 1), np.float16)), r"scales must be \[4, 1\]"),
    ],
)
def test_packing_refuses(change, message):
    parts = dict(codes=np.zeros((4, 64), np.uint8), scales=np.ones((4, 1), np.float16)) | change
    with pytest.raises(ValueError, match=message):
        pack_int4(**parts)


def test_multiplying_refuses():
    weight = pack_int4(np.zeros((4, 64), np.uint8), np.ones((4, 1), np.float16))
    stacked = pack_int4(np.zeros((2, 4, 64), np.uint8), np.ones((2, 4, 1), np.float16))
    x = jnp.ones((1, 128), jnp.bfloat16)
    for message, arguments, config in [
        ("cast it", (x.astype(jnp.float32), weight), None),
        (r"must be \[M, 128\]", (x[:, :64], weight), None),
        (r"must be \[M, 128\]", (x[0], weight), None),
        ("takes a layer", (x, stacked), None),
        ("takes a layer", (x, weight, 0), None),
        (r"not in \[0, 1\]", (x, stacked, 2), None),
        ("2 warps of 128 columns do not divide k = 128", (x, weight), Config(2, 1)),
    ]:
        with pytest.raises(ValueError, match=message):
            int4_matmul(*arguments, config=config, interpret=True)
    assert int4_matmul(x[:0], weight).shape == (0, 4)


@pytest.mark.parametrize("device", [RTX_3090, H200])
def test_heuristics_fit_every_shape(device):
    for shape in MATMULS:
        for m in VERIFY_ROWS:
            config = heuristics((m, shape.n, shape.k), device)
            assert config.warps == 4 and config.programs % device.cores == 0
