import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm_rope import split_norm_rope, split_norm_rope_reference
from tests.kernels.implementations import IMPLEMENTATIONS, implementation

SIZES = {"a quarter of 32 rotated": (5, 6, 2, 32, 4), "all of 16 rotated": (1, 3, 3, 16, 8)}


def make_case(rows, heads, kv_heads, dim, half, dtype="float32"):
    rng = np.random.default_rng(rows)
    angle = rng.uniform(0, 7, (rows, half))
    arrays = (rng.normal(size=(rows, 2 * (heads + kv_heads) * dim)), *rng.normal(size=(2, dim)))
    return [*(jnp.asarray(t, dtype) for t in arrays), *(jnp.asarray(f(angle), "float32") for f in (np.cos, np.sin))]


def in_float64(qkv, q_norm, k_norm, cos, sin, heads, kv_heads, eps):
    qkv, q_norm, k_norm, cos, sin = (np.asarray(t, np.float64) for t in (qkv, q_norm, k_norm, cos, sin))
    rows, dim, half = len(qkv), len(q_norm), cos.shape[1]
    parts = qkv.reshape(rows, -1, dim)
    q, k, v = parts[:, : 2 * heads : 2], parts[:, 2 * heads : 2 * heads + kv_heads], parts[:, -kv_heads:]
    out = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 + norm)
        pairs = (y[..., :half] + 1j * y[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
        out.append(np.concatenate([pairs.real, pairs.imag, y[..., 2 * half :]], axis=-1))
    return *out, v


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_float64(name, sizes):
    arguments, options = make_case(*sizes), dict(heads=sizes[1], kv_heads=sizes[2], eps=1e-6)
    run = implementation(
        name,
        functools.partial(split_norm_rope, **options),
        functools.partial(split_norm_rope_reference, **options),
    )
    for ours, theirs in zip(run(*arguments), in_float64(*arguments, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
def test_rounds_as_the_reference(name):
    """The normalised row is rounded before it is rotated."""
    arguments, options = make_case(3, 4, 2, 64, 8, "bfloat16"), dict(heads=4, kv_heads=2, eps=1e-6)
    both = (
        functools.partial(split_norm_rope, **options),
        functools.partial(split_norm_rope_reference, **options),
    )
    ours = implementation(name, *both)(*arguments)
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU's compiler may skip the rounding in between
        theirs = both[1](*map(np.asarray, arguments))
    for a, b in zip(ours, theirs, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (a == b).mean() > 0.99  # a sum in another order may round the other way
        np.testing.assert_allclose(a, b, atol=0.04)


def test_refuses():
    arguments, options = make_case(2, 4, 2, 16, 4), dict(heads=4, kv_heads=2, eps=1e-6, interpret=True)
    with pytest.raises(ValueError, match="qkv must be"):
        split_norm_rope(arguments[0][:, 1:], *arguments[1:], **options)
    with pytest.raises(ValueError, match="norms must be"):
        split_norm_rope(*arguments[:2], arguments[2][:8], *arguments[3:], **options)
    with pytest.raises(ValueError, match="cos and sin must be"):
        split_norm_rope(*arguments[:4], arguments[4][:1], **options)
