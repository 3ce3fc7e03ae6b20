import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_net import (
    Config,
    Pending,
    Rows,
    heuristics,
    verify_gated_delta_net,
    verify_gated_delta_net_reference,
)
from pallas_kernels.shapes import GATED_DELTA_NET, VERIFY_ROWS
from tests.kernels.implementations import IMPLEMENTATIONS, implementation, relative_rms

LAYERS = 2


class Sizes(NamedTuple):
    """`path` says which of the pending rows of each sequence were accepted; `parents` is None for chains.

    `waits` is false where nothing is pending.
    """

    path: tuple[tuple[int, ...], ...]
    n: int
    parents: tuple[tuple[int, ...], ...] | None
    key_heads: int
    heads: int
    keys: int
    values: int
    config: Config
    dtype: str = "float32"
    commit: bool = False
    waits: bool = True


SIZES = {
    "a chain of 17 after all, some and no rows": Sizes(
        ((1, 1, 1, 1, 1), (1, 1, 0, 0, 0), (0, 0, 0, 0, 0)), 17, None, 1, 2, 64, 32, Config(32, ahead=False)
    ),
    "a tree after a path of a tree, fp16": Sizes(
        ((1, 0, 1), (1, 1, 0)),
        7,
        ((-1, 0, 0, 1, 1, 3, 2), (-1, 0, 1, 2, 1, 0, -2)),
        2,
        6,
        32,
        32,
        Config(16),
        "float16",
    ),
    "one row": Sizes(((1,),), 1, None, 1, 3, 16, 16, Config(16)),
    "a chain that is written at once": Sizes(
        ((1, 1), (0, 0)), 5, ((-1, 0, 1, 2, -2), (-2, -2, -2, -2, -2)), 1, 2, 64, 16, Config(16), commit=True
    ),
    "the same, read in parts, fp16": Sizes(
        ((1, 0),), 3, None, 1, 2, 64, 16, Config(16, ahead=False), "float16", commit=True
    ),
    "a first row": Sizes(((0,),), 1, None, 1, 2, 16, 16, Config(16), commit=True, waits=False),
}


def ancestors(parents, n):
    """Rows on the path to each, itself last; none for padding, whose parent is -2."""
    parents = range(-1, n - 1) if parents is None else parents
    paths = []
    for i, parent in enumerate(parents):
        paths.append([] if parent == -2 else [i] if parent == -1 else [*paths[parent], i])
    return paths


def step(state, q, k, v, g, beta):
    """The definition: state `[heads, Dk, Dv]` after a row, and its output and delta `[heads, Dv]`."""
    state = np.exp(g)[:, None, None] * state
    delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
    state = state + k[:, :, None] * delta[:, None, :]
    return state, np.einsum("hkv,hk->hv", state, q), delta


def make_case(sizes):
    """Arguments, and expected out, delta, G and state; of rows that leave no trace nothing is a number."""
    rng = np.random.default_rng(sizes.n)
    batch, n, waiting = len(sizes.path), sizes.n, len(sizes.path[0])
    group = sizes.heads // sizes.key_heads

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def unit(*shape):
        x = normal(*shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def log_decay(*shape):
        return -np.exp(2 * normal(*shape) - 1)  # from next to nothing to far below what exp can hold in a block

    rows = Rows(
        unit(batch, n, sizes.key_heads, sizes.keys),
        unit(batch, n, sizes.key_heads, sizes.keys),
        normal(batch, n, sizes.heads, sizes.values),
        log_decay(batch, n, sizes.heads),
        rng.uniform(size=(batch, n, sizes.heads)).astype(np.float32),
    )
    pending = Pending(
        unit(LAYERS, batch, waiting, sizes.key_heads, sizes.keys),
        normal(LAYERS, batch, waiting, sizes.heads, sizes.values),
        np.cumsum(log_decay(LAYERS, batch, waiting, sizes.heads), axis=2),
    )
    state = normal(LAYERS, batch, sizes.heads, sizes.keys, sizes.values).astype(sizes.dtype)
    path = np.array(sizes.path, bool)
    layer = LAYERS - 1

    settled = state.astype(np.float64)
    out, delta = np.zeros((2, *rows.v.shape))
    total = np.zeros(rows.g.shape)
    mask = np.zeros((batch, n, n), bool)
    for b in range(batch):
        kept = np.flatnonzero(path[b])
        if len(kept):
            last = pending.log_decay[layer, b, kept[-1]].astype(np.float64)
            settled[layer, b] *= np.exp(last)[:, None, None]
        for i in kept:
            key = np.repeat(pending.key[layer, b, i], group, axis=0)
            weight = np.exp(last - pending.log_decay[layer, b, i])[:, None]
            settled[layer, b] += key[:, :, None] * (weight * pending.delta[layer, b, i])[:, None, :]
        start = settled[layer, b].astype(sizes.dtype).astype(np.float64)
        for i, way in enumerate(ancestors(sizes.parents and sizes.parents[b], n)):
            mask[b, i, way] = True
            at = start
            for j in way:
                q, k = (np.repeat(t[b, j].astype(np.float64), group, axis=0) for t in rows[:2])
                at, out[b, i], delta[b, i] = step(at, q, k, *(t[b, j].astype(np.float64) for t in rows[2:]))
                total[b, i] += rows.g[b, j]
            if sizes.commit and way:
                settled[layer, b] = at
    for t in pending:
        t[layer][~path] = np.nan
    for t in rows:
        t[~mask.diagonal(axis1=1, axis2=2)] = np.nan
    waiting = (pending, path) if sizes.waits else (None, None)
    return (rows, mask, state, layer, *waiting), (out, delta, total, settled)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_float64(name, sizes):
    arguments, expected = make_case(sizes)
    kernel, reference = (
        functools.partial(f, commit=sizes.commit) for f in (verify_gated_delta_net, verify_gated_delta_net_reference)
    )
    verified = implementation(name, kernel, reference, config=sizes.config)(*arguments)
    valid = arguments[1].diagonal(axis1=1, axis2=2)
    # Where an fp16 number lies between two neighbours rounding may differ, and the block reads what was stored.
    tolerance = 1e-4 if sizes.dtype == "float16" else 1e-5 if name == "gpu" else 1e-6
    for field, ours, theirs in zip(verified._fields[:3], verified[:3], expected[:3], strict=True):
        assert relative_rms(np.asarray(ours)[valid], theirs[valid]) < tolerance, field
    assert verified.state.dtype == sizes.dtype
    assert relative_rms(verified.state, expected[3]) < 3 * tolerance
    np.testing.assert_array_equal(verified.state[0], arguments[2][0])  # the other layer


def test_heuristics_fit_the_heads():
    shape = GATED_DELTA_NET
    for batch in (1, 8, 64):
        for n in VERIFY_ROWS:
            config = heuristics((batch, shape.value_heads, shape.value_dim, n))
            assert config.values >= 16 and shape.value_dim % config.values == 0


def test_refuses():
    (rows, mask, state, layer, pending, path), _ = make_case(SIZES["one row"])
    good = dict(rows=rows, mask=mask, state=state, layer=layer, pending=pending, path=path)
    for message, change in [
        ("state must be float32 or float16", dict(state=state.astype(jnp.bfloat16))),
        (r"v must be float32\[1, 1, 3, 16\]", dict(rows=rows._replace(v=rows.v[..., :8]))),
        ("g must be float32", dict(rows=rows._replace(g=rows.g.astype(np.float16)))),
        ("pending delta must be", dict(pending=pending._replace(delta=pending.delta[0]))),
        ("mask must be bool", dict(mask=mask.astype(np.int32))),
        ("go together", dict(path=None)),
        ("blocks of 1 to 64 rows", dict(path=path[:, :0])),
        ("powers of two", dict(state=state[..., :8])),
        ("do not divide Dv = 16", dict(config=Config(32))),
    ]:
        with pytest.raises(ValueError, match=message):
            verify_gated_delta_net(**good | change, interpret=True)
