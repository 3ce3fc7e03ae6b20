from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import KNOWN
from pallas_kernels.gated_delta_net_prefill import (
    CHUNK,
    Config,
    heuristics,
    prefill_gated_delta_net,
    prefill_gated_delta_net_reference,
)
from pallas_kernels.shapes import GATED_DELTA_NET
from tests.kernels.implementations import IMPLEMENTATIONS, implementation, relative_rms


class Sizes(NamedTuple):
    """`rows` are first and last + 1 of the valid rows of each sequence."""

    n: int
    rows: tuple[tuple[int, int], ...]
    key_heads: int
    heads: int
    keys: int
    values: int
    config: Config
    dtype: str


SIZES = {
    "lengths around the border of a chunk, fp32": Sizes(
        CHUNK + 1, ((0, 1), (0, 63), (0, 64), (0, 65), (2, 64), (0, 0)), 1, 2, 32, 16, Config(16, 4), "float32"
    ),
    "three chunks, heads that share a key, bf16": Sizes(
        3 * CHUNK - 1, ((0, 3 * CHUNK - 1), (70, 130)), 2, 4, 16, 32, Config(16, 4), "bfloat16"
    ),
    "a chunk, fp16": Sizes(CHUNK, ((0, CHUNK),), 1, 1, 64, 32, Config(32, 4), "float16"),
    "one row, bf16": Sizes(1, ((0, 1),), 1, 3, 16, 16, Config(16, 4), "bfloat16"),
}


def make_case(sizes):
    """Arguments, in which nothing of rows that are not valid is a number; and out and state by the definition."""
    rng = np.random.default_rng(sizes.n)
    batch, group = len(sizes.rows), sizes.heads // sizes.key_heads

    def normal(*shape):
        return rng.normal(size=(batch, *shape))

    q, k = (jnp.asarray(3 * normal(sizes.n, sizes.key_heads, sizes.keys), sizes.dtype) for _ in range(2))
    v = jnp.asarray(normal(sizes.n, sizes.heads, sizes.values), sizes.dtype)
    # From next to no decay to far below what exp can hold in a chunk.
    g = -np.exp(2 * normal(sizes.n, sizes.heads) - 3).astype(np.float32)
    beta = rng.uniform(size=g.shape).astype(np.float32)
    state = normal(sizes.heads, sizes.keys, sizes.values).astype(np.float32)
    valid = np.array([[first <= i < end for i in range(sizes.n)] for first, end in sizes.rows])

    def unit(t):
        t = np.repeat(np.asarray(t, np.float64), group, axis=2)
        return t / np.sqrt(np.sum(t * t, axis=-1, keepdims=True) + 1e-6)

    unit_q, unit_k, exact_v = unit(q) * sizes.keys**-0.5, unit(k), np.asarray(v, np.float64)
    out, after = np.zeros(v.shape), state.astype(np.float64)
    for b, i in np.argwhere(valid):
        after[b] *= np.exp(g[b, i].astype(np.float64))[:, None, None]
        delta = beta[b, i][:, None] * (exact_v[b, i] - np.einsum("hkv,hk->hv", after[b], unit_k[b, i]))
        after[b] += unit_k[b, i][:, :, None] * delta[:, None, :]
        out[b, i] = np.einsum("hkv,hk->hv", after[b], unit_q[b, i])
    poisoned = [
        np.where(valid.reshape(batch, sizes.n, *[1] * (t.ndim - 2)), np.asarray(t, np.float32), np.nan)
        for t in (q, k, v, g, beta)
    ]
    arguments = [*(jnp.asarray(t, sizes.dtype) for t in poisoned[:3]), *poisoned[3:], valid, state]
    return arguments, (out, after)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_float64(name, sizes):
    arguments, (out, state) = make_case(sizes)
    prefill = implementation(name, prefill_gated_delta_net, prefill_gated_delta_net_reference, config=sizes.config)
    result = prefill(*arguments)
    assert result.out.dtype == sizes.dtype and result.state.dtype == jnp.float32
    # The state never passes through half precision, whatever the rows are in.
    assert relative_rms(result.state, state) < 3e-5
    valid = arguments[5]
    tolerance = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}[sizes.dtype]
    assert relative_rms(np.asarray(result.out, np.float32)[valid], out[valid]) < tolerance
    idle = ~valid.any(axis=1)
    np.testing.assert_array_equal(result.state[idle], arguments[6][idle])


def test_heuristics_fit_the_heads():
    for device in KNOWN:
        for values in (16, 64, GATED_DELTA_NET.value_dim):
            config = heuristics(values, device)
            assert config.values >= 16 and values % config.values == 0


def test_refuses():
    (q, k, v, g, beta, valid, state), _ = make_case(SIZES["one row, bf16"])
    good = dict(q=q, k=k, v=v, g=g, beta=beta, valid=valid, state=state)
    for message, change in [
        ("q must be bfloat16, float16 or float32", dict(q=q.astype(jnp.int32))),
        (r"k must be bfloat16\[1, 1, 1, 16\]", dict(k=k.astype(jnp.float32))),
        (r"v must be bfloat16\[1, 1, 3, 16\]", dict(v=v[..., :8])),
        ("g must be float32", dict(g=jnp.asarray(g, jnp.bfloat16))),
        ("valid must be bool", dict(valid=valid.astype(np.int32))),
        ("state must be float32", dict(state=state.astype(np.float16))),
        ("powers of two", dict(state=state[..., :8])),
        ("do not divide Dv = 16", dict(config=Config(32, 4))),
    ]:
        with pytest.raises(ValueError, match=message):
            prefill_gated_delta_net(**good | change, interpret=True)
