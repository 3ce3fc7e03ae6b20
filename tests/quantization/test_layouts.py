"""Layouts of integers: what goes in comes out, and what does not fit is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.quantization import LAYOUTS, dequantize, in_rows, quantize


@pytest.mark.parametrize(
    "bits, group, scale_dtype, shape",
    [
        (4, 128, "float16", (3, 65, 256)),  # a stack; a channel more than a block
        (4, 128, "bfloat16", (64, 128)),
        (8, 64, "float16", (2, 63, 192)),
        (8, None, "bfloat16", (130, 128)),  # one scale a channel
    ],
)
def test_the_layout_of_the_kernels_gives_back_what_it_got(bits, group, scale_dtype, shape):
    w = quantize(jax.random.normal(jax.random.key(0), shape), bits, group, scale_dtype=scale_dtype).astype("bfloat16")
    packed = LAYOUTS["mma"].pack(w)
    assert (packed.layout, packed.shape, packed.dtype) == ("mma", shape, "bfloat16")
    assert packed.codes.dtype == packed.scales.dtype == jnp.int32 and packed.codes.shape[:-5] == shape[:-2]
    back = in_rows(packed)
    assert jax.tree.structure(back) == jax.tree.structure(w)
    jax.tree.map(np.testing.assert_array_equal, back, w)
    np.testing.assert_array_equal(dequantize(packed, "float32"), dequantize(w, "float32"))
    # Rows are padded to whole blocks of 64 and to no more than that.
    padded = -(-shape[-2] // 64) * 64
    assert packed.nbytes * shape[-2] == w.nbytes * padded


@pytest.mark.parametrize(
    "bits, group, options, words",
    [
        (4, 64, {}, "groups of 128 columns, got 64"),
        (8, 32, {}, "groups of a multiple of 64 columns"),
        (4, 128, {"scale_dtype": "float32"}, "float32"),
        (8, 64, {"symmetric": False}, "zero points"),
    ],
)
def test_what_the_layout_of_the_kernels_cannot_hold(bits, group, options, words):
    w = quantize(jnp.ones((64, 256)), bits, group, **options)
    with pytest.raises(ValueError, match=words):
        LAYOUTS["mma"].pack(w)


def test_the_layout_of_the_kernels_has_columns_in_their_own_order():
    w = quantize(jnp.ones((64, 256)), 4, 128)
    with pytest.raises(ValueError, match="act-order"):
        LAYOUTS["mma"].pack(w.replace(group_of=jnp.arange(256, dtype=jnp.int32) % 2))
