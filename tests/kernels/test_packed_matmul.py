"""The int4 and the int8 matmul, which share everything but how codes lie and become operands."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import int4_matmul as int4
from pallas_kernels import int8_matmul as int8
from pallas_kernels._packed_matmul import Config, permute_columns, quantize_rows
from pallas_kernels.device import H200, RTX_3090
from pallas_kernels.shapes import MATMULS, VERIFY_ROWS
from tests.kernels.implementations import IMPLEMENTATIONS, implementation, relative_rms

MODULES = {4: int4, 8: int8}


class Sizes(NamedTuple):
    """Tiles hold 8 rows; units 64 channels by 128 (int4) or 64 (int8) columns; programs up to 32 rows and 4 warps."""

    bits: int
    activation_bits: int
    m: int
    n: int
    k: int
    config: Config
    x_dtype: str = "bfloat16"
    scale_dtype: str = "float16"
    group: int = 128


SIZES = {
    "int4, one row, one channel, one unit for nine programs": Sizes(4, 16, 1, 1, 128, Config(1, 9)),
    "int4, three tiles of rows, a block shared by four programs": Sizes(4, 16, 17, 65, 512, Config(1, 7), "float16"),
    "int4, a row more than a program takes": Sizes(4, 16, 33, 64, 256, Config(2, 3, False), "bfloat16", "bfloat16"),
    "int4 by int8, a row more than a tile, a channel less than a block": Sizes(4, 8, 9, 63, 512, Config(4, 2, False)),
    "int8, a row more than a tile, nearly three blocks": Sizes(8, 16, 9, 191, 128, Config(2, 2)),
    "int8, one scale a channel, fp16": Sizes(8, 16, 8, 64, 192, Config(1, 2), "float16", "bfloat16", 192),
    "int8 by int8, two tiles": Sizes(8, 8, 16, 65, 256, Config(4, 2), "float16", "bfloat16", 64),
}


def matrix(rng, bits, n, k, scale_dtype="float16", stack=(), group=128):
    """Bytes that hold every value, scales of either sign, and the float64 matrix that they stand for."""
    codes = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), (*stack, n, k * bits // 8)).reshape(-1))
    codes = codes.reshape(*stack, n, k * bits // 8)
    scales = rng.uniform(0.002, 0.02, (*stack, n, k // group)) * rng.choice([-1, 1], (*stack, n, k // group))
    scales = jnp.asarray(scales, scale_dtype)
    values = codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(*stack, n, k)
    values = values.astype(np.float64) - 2 ** (bits - 1)
    return codes, scales, values * np.repeat(np.asarray(scales, np.float64), group, axis=-1)


def pack(bits, codes, scales):
    return (int4.pack_int4 if bits == 4 else int8.pack_int8)(codes, scales)


def unpack(bits, weight):
    return (int4.unpack_int4 if bits == 4 else int8.unpack_int8)(weight)


def multiplier(name, bits, activation_bits=16, **options):
    """`(x, weight, layer) -> fp32`."""
    kernel, reference = (
        (int4.int4_matmul, int4.int4_matmul_reference) if bits == 4 else (int8.int8_matmul, int8.int8_matmul_reference)
    )
    both = dict(out_dtype="float32", activation_bits=activation_bits)
    return implementation(name, functools.partial(kernel, **both), functools.partial(reference, **both), **options)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_float64(name, sizes):
    rng = np.random.default_rng(sizes.m + sizes.n)
    codes, scales, expected = matrix(rng, sizes.bits, sizes.n, sizes.k, sizes.scale_dtype, group=sizes.group)
    weight = pack(sizes.bits, codes, scales)
    x = jnp.asarray(rng.normal(size=(sizes.m, sizes.k)), sizes.x_dtype)
    multiply = multiplier(name, sizes.bits, sizes.activation_bits, config=sizes.config)
    y = multiply(x, weight)
    rows = np.asarray(x, np.float64)
    if sizes.activation_bits == 8:
        integers, scale = jax.jit(quantize_rows)(x)
        rows = np.asarray(integers, np.float64) * np.asarray(scale, np.float64)
    assert relative_rms(y, rows @ expected.T) < 1e-6

    # A row that holds anything, as padding may, changes no other.
    dirty = multiply(x.at[-1].set(jnp.nan), weight)
    np.testing.assert_array_equal(dirty[:-1], y[:-1])
    assert np.isnan(dirty[-1]).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", MODULES)
def test_dequantises_exactly_and_finds_the_layer(name, bits):
    """A row of the identity picks a column: the code times the scale, with no rounding at all."""
    n, k, layers = 65, 384, 3
    codes, scales, expected = matrix(np.random.default_rng(0), bits, n, k, stack=(layers,))
    weight = pack(bits, codes, scales)
    assert set(codes.reshape(-1)) == set(range(256))
    multiply = multiplier(name, bits, config=Config(1, 4))
    for layer in range(layers):
        for first in range(0, k, 32):
            rows = jnp.eye(32, k, first, dtype=jnp.bfloat16)
            np.testing.assert_array_equal(multiply(rows, weight, layer), expected[layer, :, first : first + 32].T)


@pytest.mark.parametrize("bits", MODULES)
def test_many_rows_take_an_ordinary_product(bits):
    rng = np.random.default_rng(3)
    codes, scales, expected = matrix(rng, bits, 65, 256)
    x = jnp.asarray(rng.normal(size=(129, 256)), jnp.bfloat16)
    y = multiplier("gpu", bits)(x, pack(bits, codes, scales))
    # The matrix is rounded to bf16, the products are not.
    assert relative_rms(y, np.asarray(x, np.float64) @ expected.T) < 4e-3


@pytest.mark.parametrize("bits", MODULES)
@pytest.mark.parametrize("n", [1, 64, 191])
def test_unpacking_undoes_packing(bits, n):
    codes, scales, _ = matrix(np.random.default_rng(n), bits, n, 384, "bfloat16", stack=(2,))
    weight = pack(bits, codes, scales)
    assert weight.n == n and weight.k == 384 and weight.stack == (2,)
    for packed, original in zip(unpack(bits, weight), (codes, scales), strict=True):
        np.testing.assert_array_equal(packed, original)


def test_the_padding_of_a_block_is_zero():
    for bits, nothing in ((4, 0x88), (8, 0x80)):
        codes, scales, _ = matrix(np.random.default_rng(4), bits, 65, 128)
        weight = pack(bits, codes, scales)
        whole = type(weight)(**(vars(weight) | {"n": 128}))
        assert (np.asarray(unpack(bits, whole)[0])[65:] == nothing).all()


def test_rows_are_rounded_to_nearest():
    x = np.random.default_rng(5).normal(size=(4, 64)) * [[1e-3], [1], [1e3], [0]]
    codes, scale = quantize_rows(jnp.asarray(x, jnp.float32))
    assert np.abs(codes).max(axis=1).tolist() == [127, 127, 127, 0]
    assert (np.abs(np.asarray(codes) * np.asarray(scale) - x) <= np.asarray(scale) * 0.5001).all()


def test_columns_are_permuted_within_64():
    order = np.asarray(permute_columns(jnp.arange(128, dtype=jnp.int8)[None]))[0]
    assert order[:20].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 32, 34, 33, 35, 36, 38, 37, 39, 8, 10, 9, 11]
    assert sorted(order[:64]) == list(range(64)) and (order[64:] == order[:64] + 64).all()


REFUSED = [
    (4, dict(codes=np.zeros((4, 60), np.uint8)), "K a multiple of 128"),
    (4, dict(codes=np.zeros((4, 64), np.int8)), "codes must be uint8"),
    (4, dict(scales=np.ones((4, 1), np.float32)), "float16 or bfloat16, got float32"),
    (4, dict(scales=np.ones((4, 2), np.float16)), r"scales must be \[4, 1\]"),
    (4, dict(scales=np.ones((5, 1), np.float16)), r"scales must be \[4, 1\]"),
    (8, dict(codes=np.zeros((4, 100), np.uint8)), "K a multiple of 64"),
    (8, dict(codes=np.zeros((4, 128), np.int8)), "codes must be uint8"),
    (8, dict(scales=np.ones((4, 1), np.float32)), "float16 or bfloat16, got float32"),
    (8, dict(scales=np.ones((4, 3), np.float16)), "a multiple of 64 columns"),
    (8, dict(scales=np.ones((5, 1), np.float16)), "scales must be"),
]


@pytest.mark.parametrize("bits, change, message", REFUSED)
def test_packing_refuses(bits, change, message):
    parts = dict(codes=np.zeros((4, 128 * bits // 8), np.uint8), scales=np.ones((4, 1), np.float16)) | change
    with pytest.raises(ValueError, match=message):
        pack(bits, **parts)


def test_multiplying_refuses():
    weight = int4.pack_int4(np.zeros((4, 64), np.uint8), np.ones((4, 1), np.float16))
    stacked = int4.pack_int4(np.zeros((2, 4, 64), np.uint8), np.ones((2, 4, 1), np.float16))
    x = jnp.ones((1, 128), jnp.bfloat16)
    for message, arguments, options in [
        ("cast it", (x.astype(jnp.float32), weight), {}),
        (r"must be \[M, 128\]", (x[:, :64], weight), {}),
        (r"must be \[M, 128\]", (x[0], weight), {}),
        ("takes a layer", (x, stacked), {}),
        ("takes a layer", (x, weight, 0), {}),
        (r"not in \[0, 1\]", (x, stacked, 2), {}),
        ("2 warps of 128 columns do not divide k = 128", (x, weight), dict(config=Config(2, 1))),
        ("8 or 16, got 4", (x, weight), dict(activation_bits=4)),
    ]:
        with pytest.raises(ValueError, match=message):
            int4.int4_matmul(*arguments, interpret=True, **options)
    assert int4.int4_matmul(x[:0], weight).shape == (0, 4)


@pytest.mark.parametrize("device", [RTX_3090, H200])
def test_heuristics_fit_every_shape(device):
    for shape in MATMULS:
        for m in VERIFY_ROWS:
            for module in MODULES.values():
                config = module.heuristics((m, shape.n, shape.k), 16, device)
                assert config.warps == 4 and config.programs % device.cores == 0


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")
@pytest.mark.parametrize("bits", MODULES)
def test_two_runs_are_the_same_bit_for_bit(bits):
    """No result depends on which program comes first."""
    rng = np.random.default_rng(6)
    codes, scales, expected = matrix(rng, bits, 5120, 6144)
    x = jnp.asarray(rng.normal(size=(16, 6144)), jnp.bfloat16)
    multiply, weight = multiplier("gpu", bits), pack(bits, codes, scales)
    first = np.asarray(multiply(x, weight))
    assert relative_rms(first, np.asarray(x, np.float64) @ expected.T) < 1e-6
    for _ in range(10):
        np.testing.assert_array_equal(multiply(x, weight), first)
