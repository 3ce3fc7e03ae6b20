import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200, RTX_3090
from pallas_kernels.shapes import DRAFTER_ATTENTION, FULL_ATTENTION, VERIFY_ROWS
from pallas_kernels.verify_attention import (
    Config,
    PagedCache,
    heuristics,
    verify_attention,
    verify_attention_reference,
)
from tests.kernels.implementations import IMPLEMENTATIONS, implementation, relative_rms
from tests.kernels.paged import make_cache, softmax_in_float64

PAGE = 32


class Sizes(NamedTuple):
    """One case; the lengths are those of its sequences."""

    n: int
    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    config: Config
    mask: str = "causal"
    window: int | None = None
    int8: bool = False


SIZES = {
    "one row over lengths around pages and splits": Sizes(
        1, 6, 1, 32, (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96), Config(16, 16, 3)
    ),
    "a tree, two tiles of rows, int8": Sizes(9, 6, 2, 16, (40, 96, 0), Config(32, 32, 2), "tree", None, True),
    "a window over a block that sees all of itself": Sizes(
        8, 4, 2, 16, (0, 7, 20, 96), Config(16, 16, 4), "all", 16, False
    ),
}


def make_mask(rng, kind, batch, n):
    if kind == "all":
        return np.ones((batch, n, n), bool)
    if kind == "causal":
        return np.tile(np.tri(n, dtype=bool), (batch, 1, 1))
    mask = np.tile(np.eye(n, dtype=bool), (batch, 1, 1))
    for b in range(batch):
        for i in range(1, n):
            mask[b, i] |= mask[b, rng.integers(i)]
    mask[-1, -1] = False  # padding: reads nothing of the block, and is read by nobody
    return mask


def make_case(sizes, layers=2):
    """Arguments of the function, keywords, and the expected result. Nothing that may not be read is a number."""
    rng = np.random.default_rng(sizes.n + sizes.dim)
    batch, max_pages = len(sizes.lengths), max(sizes.lengths) // PAGE + 1
    pages = batch * max_pages + 1
    pool = (layers, pages, PAGE, sizes.kv_heads, sizes.dim)
    table = rng.permutation(pages - 1)[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    lengths = np.array(sizes.lengths, np.int32)
    layer = layers - 1
    positions = lengths[:, None] + np.arange(sizes.n, dtype=np.int32)

    q, own_k, own_v = (
        jnp.asarray(rng.normal(size=(batch, sizes.n, h, sizes.dim)), jnp.bfloat16)
        for h in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    mask = make_mask(rng, sizes.mask, batch, sizes.n)
    cache, values = make_cache(rng, pool, table, lengths, layer, sizes.int8)
    unread = ~mask.any(axis=1)
    own_v = jnp.where(unread[..., None, None], jnp.nan, own_v)

    expected = np.zeros(q.shape)
    for b, length in enumerate(lengths):
        tokens = np.arange(length)
        context = [t[layer, table[b, tokens // PAGE], tokens % PAGE] for t in values]
        own = [np.nan_to_num(np.asarray(t[b], np.float64)) for t in (own_k, own_v)]
        readable = np.ones((sizes.n, length), bool)
        if sizes.window:
            readable = tokens > positions[b, :, None] - sizes.window
        k, v = (np.concatenate(pair) for pair in zip(context, own, strict=True))
        expected[b] = softmax_in_float64(
            np.asarray(q[b], np.float64), k, v, np.concatenate([readable, mask[b]], axis=1)
        )
    arguments = (q, own_k, own_v, jnp.asarray(mask), cache, layer, table, lengths)
    return arguments, dict(positions=positions) if sizes.window else {}, expected


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_float64(name, sizes):
    arguments, positions, expected = make_case(sizes)
    both = dict(out_dtype="float32", window=sizes.window)
    attend = implementation(
        name,
        functools.partial(verify_attention, **both),
        functools.partial(verify_attention_reference, **both),
        config=sizes.config,
    )
    out = attend(*arguments, **positions)
    # The weights of values are rounded to bf16, as in every such kernel.
    assert relative_rms(out, expected) < (1e-6 if name == "reference" else 3e-3)
    for ours, theirs, length in zip(out, expected, sizes.lengths, strict=True):
        assert relative_rms(ours, theirs) < 5e-3, length
    np.testing.assert_array_equal(np.asarray(out)[expected == 0], 0)  # a row that reads nothing
    assert (expected == 0).any() == (sizes.mask == "tree")


@pytest.mark.parametrize("device", [RTX_3090, H200])
@pytest.mark.parametrize("shape", [FULL_ATTENTION, DRAFTER_ATTENTION])
def test_heuristics_fill_the_device_once(device, shape):
    for batch in (1, 3, 64):
        for n in VERIFY_ROWS:
            queries = n * shape.heads // shape.kv_heads
            config = heuristics((batch, shape.kv_heads, queries, shape.head_dim), 32768, shape.page, device)
            programs = batch * shape.kv_heads * -(-queries // config.rows)
            assert config.splits == 1 or programs * config.splits <= device.cores
            assert shape.page % config.keys == 0 and config.rows >= 16


def refuse(change, message, **options):
    arguments, _, _ = make_case(Sizes(2, 2, 1, 16, (3,), Config(16, 16, 1)))
    names = ("q", "k", "v", "mask", "cache", "layer", "block_table", "lengths")
    arguments = dict(zip(names, arguments, strict=True))
    arguments |= {name: function(arguments[name]) for name, function in change.items()}
    with pytest.raises(ValueError, match=message):
        verify_attention(**arguments, **options, interpret=True)


def test_refuses():
    refuse(dict(q=lambda q: q.astype(jnp.int32)), "cast it")
    refuse(dict(q=lambda q: q[..., :12]), "a power of two")
    refuse(dict(k=lambda k: k[:, :1]), "k and v must be bfloat16")
    refuse(dict(mask=lambda m: m.astype(jnp.int32)), "mask must be bool")
    refuse(dict(cache=lambda c: PagedCache(c.k[..., :8], c.v[..., :8])), "the cache must be")
    refuse(dict(cache=lambda c: PagedCache(c.k.astype(jnp.int8), c.v.astype(jnp.int8))), "takes float32 scales")
    refuse(dict(cache=lambda c: PagedCache(c.k.astype(jnp.float16), c.v.astype(jnp.float16))), "int8 or bfloat16")
    refuse(dict(lengths=lambda t: t[:0]), "lengths must be")
    refuse(dict(block_table=lambda t: t[:0]), "block_table must be")
    refuse({}, "a window, of at least 1, and positions go together", window=4)
    for keys in (64, 8):
        refuse({}, "or do not divide a page of 32", config=Config(16, keys, 1))
