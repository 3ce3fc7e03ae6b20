import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200, RTX_3090
from pallas_kernels.prefill_attention import Config, heuristics, prefill_attention, prefill_attention_reference
from pallas_kernels.verify_attention import PagedCache
from tests.kernels.implementations import IMPLEMENTATIONS, implementation, relative_rms
from tests.kernels.paged import make_cache, softmax_in_float64

PAGE = 32


class Sizes(NamedTuple):
    """One case: of each sequence the tokens before the chunk, and rows of padding before and after the chunk's own."""

    n: int
    heads: int
    kv_heads: int
    dim: int
    sequences: tuple[tuple[int, int, int], ...]
    config: Config | None = None
    int8: bool = False


SIZES = {
    "one tile and a row": Sizes(
        17, 6, 2, 16, ((0, 0, 0), (1, 0, 16), (14, 0, 1), (15, 1, 0), (16, 0, 17)), Config(16, 16)
    ),
    "one row short of three tiles, int8": Sizes(
        47, 4, 2, 32, ((0, 0, 0), (31, 20, 10), (32, 0, 0), (33, 46, 0), (96, 0, 47)), Config(16, 32), True
    ),
    "one row": Sizes(1, 2, 2, 64, ((0, 0, 0), (63, 0, 0), (64, 0, 0))),
    "heads of 256": Sizes(70, 2, 1, 256, ((50, 0, 0), (0, 0, 31))),
}


def make_case(sizes):
    """Arguments of the function and the expected result. Nothing that may not be read is a number."""
    rng = np.random.default_rng(sizes.n + sizes.dim)
    batch, layer = len(sizes.sequences), 1
    before, left, right = np.array(sizes.sequences).T
    real = sizes.n - left - right
    max_pages = int((before + real).max()) // PAGE + 1
    pages = batch * max_pages + 1
    table = rng.permutation(pages - 1)[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    lengths = before + real
    table[np.arange(max_pages) >= -(-lengths // PAGE)[:, None]] = pages  # no page
    pool = (2, pages, PAGE, sizes.kv_heads, sizes.dim)
    cache, values = make_cache(rng, pool, table, lengths, layer, sizes.int8)
    q = jnp.asarray(rng.normal(size=(batch, sizes.n, sizes.heads, sizes.dim)), jnp.bfloat16)
    rows = np.arange(sizes.n) - left[:, None]
    positions = np.where((rows >= 0) & (rows < real[:, None]), before[:, None] + rows, -1).astype(np.int32)
    expected = np.zeros(q.shape)
    for b, length in enumerate(lengths):
        tokens = np.arange(length)
        k, v = (t[layer, table[b, tokens // PAGE], tokens % PAGE] for t in values)
        expected[b] = softmax_in_float64(np.asarray(q[b], np.float64), k, v, tokens <= positions[b, :, None])
    return (q, cache, layer, table, positions), expected


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_float64(name, sizes):
    arguments, expected = make_case(sizes)
    attend = implementation(
        name,
        functools.partial(prefill_attention, out_dtype="float32"),
        functools.partial(prefill_attention_reference, out_dtype="float32"),
        config=sizes.config,
    )
    out = np.asarray(attend(*arguments))
    # The weights of values are rounded to bf16, as in every such kernel.
    assert relative_rms(out, expected) < (1e-6 if name == "reference" else 3e-3)
    padding = arguments[-1] < 0
    np.testing.assert_array_equal(out[padding], 0)
    errors = np.abs(out - expected)[~padding].max(axis=(1, 2))
    assert errors.max() < 0.02, np.argwhere(~padding)[errors.argmax()]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("device", [RTX_3090, H200])
def test_heuristics_fit_any_page(device, dtype):
    for dim in (16, 64, 128, 256):
        for page in (16, 48, 64, 256):
            config = heuristics(dim, jnp.dtype(dtype), page, device)
            assert page % config.keys == 0 and config.keys >= 16


def refuse(change, message, **options):
    arguments, _ = make_case(Sizes(2, 2, 1, 16, ((3, 0, 0),)))
    arguments = dict(zip(("q", "cache", "layer", "block_table", "positions"), arguments, strict=True))
    arguments |= {name: function(arguments[name]) for name, function in change.items()}
    with pytest.raises(ValueError, match=message):
        prefill_attention(**arguments, **options, interpret=True)


def test_refuses():
    refuse(dict(q=lambda q: q.astype(jnp.int32)), "cast it")
    refuse(dict(q=lambda q: q[..., :12]), "a power of two")
    refuse(dict(cache=lambda c: PagedCache(c.k[..., :8], c.v[..., :8])), "the cache must be")
    refuse(dict(block_table=lambda t: t[0]), "block_table must be")
    refuse(dict(positions=lambda p: p[:, :1]), "positions must be")
    refuse({}, "or do not divide a page of 32", config=Config(16, 64))
