"""The instructions themselves against their twins: bit for bit where nothing is rounded, which is all but sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import triton

from pallas_kernels import _instructions as instructions
from pallas_kernels._call import kernel_call
from pallas_kernels._stream_k import lane_words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU"),
]

WARPS = 2


def both(function, *operands):
    """What `function(*operands, interpret=...)` gives, with the instructions and with their twins."""
    result = jax.eval_shape(lambda *a: function(*a, interpret=True), *operands)

    def kernel(*refs, interpret):
        warp, column = lane_words(WARPS)
        *args, out = (ref.at[warp, column] for ref in refs)
        triton.store(out, function(*map(triton.load, args), interpret=interpret))

    def run(interpret):
        call = lambda *a: kernel_call(  # noqa: E731
            lambda *refs: kernel(*refs, interpret=interpret),
            a,
            jax.ShapeDtypeStruct(result.shape, result.dtype),
            name="instruction",
            grid=(1,),
            num_warps=WARPS,
            interpret=interpret,
        )
        return np.asarray(jax.jit(call)(*operands))

    return run(False), run(True)


def words(seed):
    return jax.random.bits(jax.random.key(seed), (WARPS, 128), jnp.uint32).view(jnp.int32)


def halves(seed, dtype):
    values = jax.random.normal(jax.random.key(seed), (WARPS, 128, 2)).astype(dtype)
    return lax.bitcast_convert_type(values, jnp.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nibbles(dtype):
    for index in range(4):
        real, twin = both(lambda w, i=index, **kw: instructions.nibbles_to_16bit(w, i, dtype, **kw), words(index))
        np.testing.assert_array_equal(real, twin)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bytes(dtype):
    for index in range(2):
        real, twin = both(lambda w, index=index, **kw: instructions.bytes_to_16bit(w, index, dtype, **kw), words(index))
        np.testing.assert_array_equal(real, twin)


def test_nibbles_to_bytes():
    for index in range(2):
        real, twin = both(lambda w, index=index, **kw: instructions.nibbles_to_bytes(w, index, **kw), words(index))
        np.testing.assert_array_equal(real, twin)


def test_mma_int8():
    for index in range(2):
        real, twin = both(
            lambda a, b, c, index=index, **kw: instructions.mma_int8(a, b, index, c, **kw), *map(words, range(3))
        )
        np.testing.assert_array_equal(real, twin)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mma(dtype):
    c = jax.random.normal(jax.random.key(3), (WARPS, 128))
    real, twin = both(
        lambda *a, **kw: instructions.mma_16bit(*a, dtype, **kw), *(halves(i, dtype) for i in range(3)), c
    )
    np.testing.assert_allclose(real, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_add_scaled(dtype):
    c, total = (jax.random.normal(jax.random.key(i), (WARPS, 128)) for i in range(2))
    for index in range(4):
        real, twin = both(
            lambda c, s, t, index=index, **kw: instructions.add_scaled(c, s, index, t, dtype, **kw),
            c,
            halves(2, dtype),
            total,
        )
        np.testing.assert_allclose(real, twin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_add_scaled_integers(dtype):
    sums = jax.random.randint(jax.random.key(0), (WARPS, 128), -(2**21), 2**21) + instructions.INTEGER_ZERO
    total = jax.random.normal(jax.random.key(1), (WARPS, 128))
    for index in range(4):
        real, twin = both(
            lambda c, s, t, index=index, **kw: instructions.add_scaled_integers(c, s, index, t, dtype, **kw),
            sums,
            halves(2, dtype),
            total,
        )
        np.testing.assert_allclose(real, twin, rtol=1e-6, atol=1e-6)
