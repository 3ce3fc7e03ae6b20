"""What the attention kernels share: the cache in pages, and the running softmax."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels._instructions import HIGHEST

Array = jax.Array

LOWEST = -1e30  # a score that nothing is below; finite, so that differences are numbers
LOG2_E = math.log2(math.e)  # scores are in powers of two, for which there is an instruction


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "k_scale", "v_scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of several layers, in pages.

    k, v: `[layers, pages, page, kv_heads, D]`, of the dtype of the queries, or int8.
    k_scale, v_scale: fp32 `[layers, pages, page, kv_heads]`, by which int8 is multiplied; None otherwise.
    """

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None

    @property
    def scales(self) -> list[Array]:
        """Of keys and of values, where there are any."""
        return [] if self.k_scale is None else [self.k_scale, self.v_scale]


def for_each_tile(begin, end, body, carry, *, table_ref, pool_ref, sequence, keys: int):
    """`carry = body(tile, (page, slice of it), carry)` for each tile, of `keys` tokens, of a sequence from `begin` on.

    The page of a tile is looked up a turn ahead, so that no turn waits for it before it can ask for what it holds.
    """
    pages, page = pool_ref.shape[1:3]

    def look_up(tile):
        slot = jnp.minimum(lax.div(tile * keys, page), table_ref.shape[1] - 1)
        # A sequence that is no longer decoded may have a length, but no pages.
        return jnp.minimum(table_ref[sequence, slot], pages - 1)

    def turn(tile, entry_carry):
        entry, carry = entry_carry
        following = look_up(tile + 1)
        return following, body(tile, (entry, pl.ds(lax.rem(tile * keys, page), keys)), carry)

    return lax.fori_loop(begin, end, turn, (look_up(begin), carry))[1]


def nothing_read(rows: int, dim: int) -> tuple[Array, Array, Array]:
    """The carry of `add_keys` before the first."""
    return (
        jnp.zeros((rows, dim), jnp.float32),
        jnp.full((rows,), LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def add_keys(carry, q, k, v, key_scale, value_scale, readable=None):
    """Adds keys to the softmax of `carry`: sums of values `[rows, D]`, largest scores and sums of weights `[rows]`.

    The scales multiply scores, which are in powers of two, and weights; `readable [rows, keys]`, None for all.
    """
    out, top, total = carry
    scores = triton.dot(q, k.astype(q.dtype), trans_b=True, precision=HIGHEST) * key_scale
    if readable is not None:
        scores = jnp.where(readable, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_top[:, None])
    kept = jnp.exp2(top - new_top)
    values = triton.dot((weights * value_scale).astype(q.dtype), v.astype(q.dtype), precision=HIGHEST)
    return out * kept[:, None] + values, new_top, total * kept + jnp.sum(weights, axis=1)


def read_pages(pool: Array, scale: Array | None, layer: Array | int, block_table: Array) -> Array:
    """All that the pages of `block_table [B, max_pages]` hold, `[B, tokens, kv_heads, D]` in fp32."""
    tokens = pool[layer].at[block_table].get(mode="clip").astype(jnp.float32)
    if scale is not None:
        tokens = tokens * scale[layer].at[block_table].get(mode="clip")[..., None]
    return tokens.reshape(len(block_table), -1, *pool.shape[3:])


def check_cache(cache: PagedCache, q: Array, block_table: Array) -> None:
    """Raises ValueError where the cache is not one for `q [B, L, heads, D]`."""
    batch, _, heads, dim = q.shape
    pool, int8 = cache.k.shape, cache.k.dtype == jnp.int8
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"q must be bfloat16, float16 or float32, got {q.dtype}; cast it")
    if dim & (dim - 1) or dim < 16:
        raise ValueError(f"q must be [B, rows, heads, a power of two from 16 on], got {list(q.shape)}")
    if cache.v.shape != pool or len(pool) != 5 or pool[4] != dim or heads % pool[3]:
        raise ValueError(
            f"the cache must be [layers, pages, page, a divisor of {heads}, {dim}], got {list(pool)} "
            f"and {list(cache.v.shape)}"
        )
    if cache.v.dtype != cache.k.dtype or not (int8 or cache.k.dtype == q.dtype):
        raise ValueError(f"the cache must be int8 or {q.dtype} as q, got {cache.k.dtype} and {cache.v.dtype}")
    for scale in (cache.k_scale, cache.v_scale):
        if (scale is not None) != int8 or (int8 and (scale.shape != pool[:4] or scale.dtype != jnp.float32)):
            raise ValueError(f"an int8 cache takes float32 scales {list(pool[:4])}, and no other does")
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must be [{batch}, pages], got {list(block_table.shape)}")


def check_keys(keys: int, page: int) -> None:
    """Raises ValueError where a page cannot be read `keys` at a time."""
    if keys < 16 or page % keys:
        raise ValueError(f"{keys} keys read at a time are fewer than 16 or do not divide a page of {page}")
