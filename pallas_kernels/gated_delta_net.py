"""Gated DeltaNet over a short block of rows: one pass over the state settles the last block and verifies the next.

A value head's state is a matrix `[Dk, Dv]`. With G the sum of the decays g on the path to a row, itself included, and
D[t, i] = exp(G_t - G_i), which is 0 unless i lies on the path to t:

    S0 = exp(G_leaf) S + sum_i exp(G_leaf - G_i) k_i d_i^T            over the rows of the last block that were accepted
    (I + A) d = beta (v - exp(G) S0^T k),   A[t, i] = beta_t D[t, i] (k_i . k_t)   for i before t
    o = exp(G) S0^T q + (D (q k^T)) d

(Yang et al., "Gated Delta Networks", 2024, in its chunked form.) The deltas d do not depend on which rows will be kept,
so they wait, with k and G, until that is known: the state is read once and written once a block, whatever it accepts.

A program has some columns of one head's state. (I + A)^-1 beta and D (q k^T) do not depend on them: they are worked out
while the first of them come. The programs of a head repeat that work for each other, which costs less than a kernel of
its own and the way through memory. Products are fp32, each of three TF32 products on tensor cores, whose error is close
to that of fp32: the state lives as long as the text, and the solve amplifies what its matrix lacks.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels._call import kernel_call
from pallas_kernels._delta_rule import load_rows, product, takes_heads, unit_lower_inverse
from pallas_kernels._instructions import HIGHEST

Array = jax.Array

MAX_ROWS = 64  # of a block
_KEYS_AT_ONCE = 32  # of Dk


class Rows(NamedTuple):
    """Rows of a block, fp32.

    q, k: `[B, L, key_heads, Dk]`, normalised, q scaled; v: `[B, L, value_heads, Dv]`; g, beta: `[B, L, value_heads]`.
    """

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


class Pending(NamedTuple):
    """What the last block of R rows leaves to be written, fp32, stacked by layer.

    key: `[layers, B, R, key_heads, Dk]`; delta: `[layers, B, R, value_heads, Dv]`; log_decay: G, `[layers, B, R,
    value_heads]`.
    """

    key: Array
    delta: Array
    log_decay: Array


class Verified(NamedTuple):
    """out, delta: fp32 `[B, L, value_heads, Dv]`; log_decay: fp32 `[B, L, value_heads]`; state: all layers."""

    out: Array
    delta: Array
    log_decay: Array
    state: Array


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut up.

    values: columns of the state that a program has, a power of two from 16 on that divides Dv.
    ahead: ask for all of them at the start and keep them in registers; else read some rows of them at a time.
    """

    values: int = 32
    warps: int = 4
    ahead: bool = True


def heuristics(shape: tuple[int, int, int, int]) -> Config:
    """A `Config` for `(sequences, value heads, Dv, rows)`.

    A few sequences do not fill the device: what counts is how long one program waits, which few columns, all asked for
    at the start, make shorter. Of many, more fit with fewer registers, and wait for each other. Long blocks need
    registers for themselves.
    """
    batch, heads, dim, rows = shape
    if rows > 16:
        return Config(values=16, ahead=False)
    few = batch * heads < 256
    return Config(values=min(dim, 32 if few else 64), ahead=few)


def verify_gated_delta_net(
    rows: Rows,
    mask: Array,
    state: Array,
    layer: Array | int,
    pending: Pending | None = None,
    path: Array | None = None,
    *,
    commit: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> Verified:
    """Settles one layer's state, and runs the recurrence over a block, by default without writing it.

    Value head h reads key head `h // (value_heads / key_heads)`. Rows that are not valid, and pending rows off the
    path, may hold anything.

    Args:
      rows: `L` of them for each of `B` sequences.
      mask: bool `[B, L, L]`, whether row j is on the path to row i, itself included; parents come before children. A
        row that is not on its own path is not valid: it leaves no trace, and its outputs mean nothing.
      state: fp32 or fp16 `[layers, B, value_heads, Dk, Dv]`; overwritten where the caller donates it.
      layer: an int32 scalar that a loop may count.
      pending: of the block before; None where nothing waits.
      path: bool `[B, R]`, its rows that were accepted; parents come first, here too.
      commit: write the block's valid rows as well, which must be a chain.
      config: default `heuristics`.
      interpret: see `kernel_call`.

    Returns:
      Outputs and what is pending now, unless committed; and the state with the layer's accepted rows written. The
      block reads the state as it is stored, after rounding.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
    """
    _check(rows, mask, state, pending, path)
    batch, n, heads, dim = rows.v.shape
    config = config or heuristics((batch, heads, dim, n))
    if config.values < 16 or dim % config.values:
        raise ValueError(f"{config.values} columns for a program do not divide Dv = {dim}")
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    waiting = [] if pending is None else [*pending, path.astype(jnp.int32)]
    operands = [layer, *rows, mask.astype(jnp.int32), *waiting, state]
    like_v, like_g = (jax.ShapeDtypeStruct(t.shape, jnp.float32) for t in (rows.v, rows.g))
    return Verified(
        *kernel_call(
            functools.partial(_kernel, config=config, commit=commit, interpret=interpret),
            operands,
            [like_v, like_v, like_g, jax.ShapeDtypeStruct(state.shape, state.dtype)],
            name="verify_gated_delta_net",
            grid=(dim // config.values, heads, batch),
            num_warps=config.warps,
            aliases={len(operands) - 1: 3},
            interpret=interpret,
        )
    )


def _kernel(
    layer_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, mask_ref, *refs, config: Config, commit: bool, interpret: bool
):
    """The accepted rows of the last block, and the rows of this one, on some columns of one head's state."""
    *pending_refs, state_ref, out_ref, delta_ref, log_decay_ref, new_state_ref = refs
    dot = product(interpret)
    layer, head, sequence = layer_ref[0], pl.program_id(1), pl.program_id(2)
    n, key_head = v_ref.shape[1], lax.div(head, v_ref.shape[2] // k_ref.shape[2])
    values = pl.program_id(0) * config.values + lax.iota(jnp.int32, config.values)
    width = min(k_ref.shape[3], _KEYS_AT_ONCE)
    parts = k_ref.shape[3] // width  # of Dk

    def keys_of(i):
        return i * width + lax.iota(jnp.int32, width)

    def place_of(i):
        return layer, sequence, head, keys_of(i)[:, None], values[None, :]

    ahead = [triton.load(state_ref.at[place_of(i)]) for i in range(parts)] if config.ahead else None
    loop = _unrolled if config.ahead else lax.fori_loop

    row = lax.iota(jnp.int32, _matrix_size(n))
    inside = row < n
    valid = triton.load(mask_ref.at[sequence, row, row], mask=inside, other=0) != 0

    def of_block(ref, i):
        return load_rows(ref.at[sequence, row[:, None], key_head, keys_of(i)[None, :]], valid)

    def multiply(i, products):
        k, q = of_block(k_ref, i), of_block(q_ref, i)
        return products[0] + dot(k, k, trans_b=True), products[1] + dot(q, k, trans_b=True)

    kk, qk = lax.fori_loop(0, parts, multiply, (jnp.zeros((row.size, row.size), jnp.float32),) * 2)
    g, beta = (triton.load(ref.at[sequence, row, head], mask=valid, other=0.0) for ref in (g_ref, beta_ref))
    total, decay = _path_decay(mask_ref, sequence, row, inside, g)
    solve = unit_lower_inverse(beta[:, None] * decay * kk, row, dot) * beta[None, :]

    settle = _settle(pending_refs, (layer, sequence, head, key_head), values, dot) if pending_refs else None

    def settled(i):
        part = ahead[i] if ahead else triton.load(state_ref.at[place_of(i)])
        return settle(part, keys_of(i)) if settle else part

    def read(i, sums):
        part = settled(i)
        if settle and not commit:
            triton.store(new_state_ref.at[place_of(i)], part)
        part = part.astype(jnp.float32)
        return sums[0] + dot(of_block(k_ref, i), part), sums[1] + dot(of_block(q_ref, i), part)

    v = load_rows(v_ref.at[sequence, row[:, None], head, values[None, :]], valid)
    read_k, read_q = loop(0, parts, read, (jnp.zeros_like(v),) * 2)
    from_state = jnp.exp(total)[:, None]
    delta = dot(solve, v - from_state * read_k)
    out = from_state * read_q + dot(decay * qk, delta)
    place = (sequence, row[:, None], head, values[None, :])
    mask = jnp.broadcast_to(inside[:, None], out.shape)
    triton.store(out_ref.at[place], out, mask=mask)
    triton.store(delta_ref.at[place], delta, mask=mask)
    triton.store(log_decay_ref.at[sequence, row, head], total, mask=inside & (pl.program_id(0) == 0))
    if commit:
        last, weight = _weights(total, valid, row)

        def write(i, carry):
            # Settled anew: what another thread has stored cannot be read back without a barrier.
            part = _add(settled(i), last, of_block(k_ref, i), delta * weight[:, None], dot)
            triton.store(new_state_ref.at[place_of(i)], part)
            return carry

        loop(0, parts, write, 0)


def _unrolled(begin: int, end: int, body, carry):
    for i in range(begin, end):
        carry = body(i, carry)
    return carry


def _path_decay(mask_ref, sequence: Array, row: Array, inside: Array, g: Array) -> tuple[Array, Array]:
    """G `[n]`, and D `[n, n]`, zero off the path."""
    both = inside[:, None] & inside[None, :]
    # A path is a row of the mask; both orders of it are read, so that G comes along either axis.
    on_path = triton.load(mask_ref.at[sequence, row[:, None], row[None, :]], mask=both, other=0) != 0
    leads_to = triton.load(mask_ref.at[sequence, row[None, :], row[:, None]], mask=both, other=0) != 0
    total = jnp.sum(jnp.where(on_path, g[None, :], 0.0), axis=1)
    across = jnp.sum(jnp.where(leads_to, g[:, None], 0.0), axis=0)
    # The difference first, masked before exp: under strong decay the other triangle overflows.
    return total, jnp.where(on_path, jnp.exp(jnp.where(on_path, total[:, None] - across[None, :], 0.0)), 0.0)


def _settle(refs, place, values: Array, dot):
    """The function that adds the accepted rows of the last block to a part of the state, given its place in Dk."""
    key_ref, delta_ref, log_decay_ref, path_ref = refs
    layer, sequence, head, key_head = place
    rows = path_ref.shape[1]
    row = lax.iota(jnp.int32, _matrix_size(rows))
    kept = triton.load(path_ref.at[sequence, row], mask=row < rows, other=0) != 0
    log_decay = triton.load(log_decay_ref.at[layer, sequence, row, head], mask=kept, other=0.0)
    last, weight = _weights(log_decay, kept, row)
    delta = load_rows(delta_ref.at[layer, sequence, row[:, None], head, values[None, :]], kept) * weight[:, None]

    def settle(part, keys):
        key = load_rows(key_ref.at[layer, sequence, row[:, None], key_head, keys[None, :]], kept)
        return _add(part, last, key, delta, dot)

    return settle


def _weights(log_decay: Array, kept: Array, row: Array) -> tuple[Array, Array]:
    """G of the last row that is kept, zero if there is none; and how much is left by then of what each row added."""
    last = jnp.sum(jnp.where(row == jnp.max(jnp.where(kept, row, -1)), log_decay, 0.0))
    return last, jnp.where(kept, jnp.exp(jnp.where(kept, last - log_decay, 0.0)), 0.0)


def _add(state: Array, last: Array, key: Array, delta: Array, dot) -> Array:
    """A part of the state that has decayed by `exp(last)`, and products of keys with weighted deltas, as stored."""
    return (jnp.exp(last) * state.astype(jnp.float32) + dot(key, delta, trans_a=True)).astype(state.dtype)


def _matrix_size(rows: int) -> int:
    """Rows of a matrix that a tensor core takes, at least `rows`."""
    return max(16, 1 << (rows - 1).bit_length())


def verify_gated_delta_net_reference(
    rows: Rows,
    mask: Array,
    state: Array,
    layer: Array | int,
    pending: Pending | None = None,
    path: Array | None = None,
    *,
    commit: bool = False,
) -> Verified:
    """What `verify_gated_delta_net` must equal, solved row by row."""
    n, heads = rows.v.shape[1:3]
    valid = jnp.diagonal(mask, axis1=1, axis2=2)
    q, k, v, g, beta = _by_head(rows, valid, heads)

    settled = state[layer]
    if pending is not None:
        key, delta, log_decay = _by_head([t[layer] for t in pending], path, heads)
        settled = _write(settled, key, delta, log_decay, path)
    start = settled.astype(jnp.float32)

    on_path = mask[:, None]
    total = _einsum("bij,bhj->bhi", mask.astype(jnp.float32), g)
    decay = jnp.where(on_path, jnp.exp(jnp.where(on_path, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
    from_state = jnp.exp(total)[..., None]
    a = beta[..., None] * decay * jnp.tril(_einsum("bhik,bhjk->bhij", k, k), -1)
    right = beta[..., None] * (v - from_state * _einsum("bhik,bhkv->bhiv", k, start))

    def solve(i, delta):
        return delta.at[:, :, i].set(right[:, :, i] - _einsum("bhj,bhjv->bhv", a[:, :, i], delta))

    delta = lax.fori_loop(0, n, solve, jnp.zeros_like(right))
    scores = decay * _einsum("bhik,bhjk->bhij", q, k)
    out = from_state * _einsum("bhik,bhkv->bhiv", q, start) + _einsum("bhij,bhjv->bhiv", scores, delta)
    if commit:
        settled = _write(settled, k, delta, total, valid)
    return Verified(*(t.swapaxes(1, 2) for t in (out, delta, total)), state.at[layer].set(settled))


def _by_head(arrays: Iterable[Array], kept: Array, heads: int) -> list[Array]:
    """Each `[B, rows, some heads, ...]` as `[B, heads, rows, ...]`, zero in rows that are not kept."""
    arrays = [jnp.where(kept.reshape(*kept.shape, *[1] * (t.ndim - 2)), t, 0.0).swapaxes(1, 2) for t in arrays]
    return [jnp.repeat(t, heads // t.shape[1], axis=1) for t in arrays]


def _write(state: Array, key: Array, delta: Array, log_decay: Array, kept: Array) -> Array:
    """`state [B, heads, Dk, Dv]` after the kept rows of a block, given by head."""
    row = jnp.arange(kept.shape[1])
    leaf = jnp.max(jnp.where(kept, row, -1), axis=1)[:, None, None]  # parents come first
    last = jnp.sum(jnp.where(row == leaf, log_decay, 0.0), axis=-1, keepdims=True)
    kept = kept[:, None]
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - log_decay, 0.0)), 0.0)[..., None]
    decayed = jnp.exp(last)[..., None] * state.astype(jnp.float32)
    return (decayed + _einsum("bhrk,bhrv->bhkv", key, delta * weight)).astype(state.dtype)


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=HIGHEST)


def _check(rows: Rows, mask: Array, state: Array, pending: Pending | None, path: Array | None) -> None:
    layers, batch, heads, keys, dim = state.shape
    n, key_heads = rows.k.shape[1:3]
    waiting = 1 if path is None else path.shape[-1]
    if state.dtype not in (jnp.float32, jnp.float16):
        raise ValueError(f"state must be float32 or float16, got {state.dtype}")
    if (pending is None) != (path is None):
        raise ValueError("pending rows and the path through them go together")
    if not 1 <= n <= MAX_ROWS or not 1 <= waiting <= MAX_ROWS or heads % key_heads or not takes_heads(keys, dim):
        raise ValueError(
            f"blocks of 1 to {MAX_ROWS} rows, value heads a multiple of key heads, and Dk and Dv powers of two from "
            f"16 on; got {n} and {waiting} rows, {heads} and {key_heads} heads, {keys} and {dim}"
        )
    expected = {
        "q": (rows.q, (batch, n, key_heads, keys), jnp.float32),
        "k": (rows.k, (batch, n, key_heads, keys), jnp.float32),
        "v": (rows.v, (batch, n, heads, dim), jnp.float32),
        "g": (rows.g, (batch, n, heads), jnp.float32),
        "beta": (rows.beta, (batch, n, heads), jnp.float32),
        "mask": (mask, (batch, n, n), jnp.bool_),
    }
    if pending is not None:
        expected |= {
            "pending key": (pending.key, (layers, batch, waiting, key_heads, keys), jnp.float32),
            "pending delta": (pending.delta, (layers, batch, waiting, heads, dim), jnp.float32),
            "pending log_decay": (pending.log_decay, (layers, batch, waiting, heads), jnp.float32),
            "path": (path, (batch, waiting), jnp.bool_),
        }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {dtype.__name__}{list(shape)}, got {array.dtype}{list(array.shape)}")
