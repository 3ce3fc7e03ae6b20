"""A paged cache in which nothing that may not be read is a number, and attention in float64."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.verify_attention import PagedCache


def make_cache(rng, pool, table, lengths, layer, int8) -> tuple[PagedCache, list[np.ndarray]]:
    """A cache `pool` (layers, pages, page, kv_heads, D) in which one layer holds so many tokens of each sequence.

    Also keys and values as float64.
    """
    written = np.zeros(pool[:3], bool)
    for b, length in enumerate(lengths):
        tokens = np.arange(length)
        written[layer, table[b, tokens // pool[2]], tokens % pool[2]] = True
    stored, scales, values = [], [], []
    for _ in range(2):
        if int8:
            codes = rng.integers(-128, 128, pool).astype(np.int8)
            scale = np.where(written[..., None], rng.uniform(0.005, 0.02, pool[:4]), np.nan).astype(np.float32)
            stored.append(jnp.asarray(codes))
            scales.append(jnp.asarray(scale))
            values.append(codes * scale[..., None].astype(np.float64))
        else:
            numbers = jnp.asarray(np.where(written[..., None, None], rng.normal(size=pool), np.nan), jnp.bfloat16)
            stored.append(numbers)
            values.append(np.asarray(numbers, np.float64))
    return PagedCache(*stored, *scales), values


def softmax_in_float64(q, k, v, readable):
    """`q [L, heads, D]`, `k, v [keys, kv_heads, D]`, `readable [L, keys]`."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = readable[i]
            if seen.any():
                scores = k[seen, h // group] @ q[i, h] / np.sqrt(q.shape[2])
                weights = np.exp(scores - scores.max())
                out[i, h] = weights / weights.sum() @ v[seen, h // group]
    return out
