"""Gated DeltaNet over a short block of rows: one pass over the state settles the last block and verifies the next.

A value head's state is a matrix `[Dk, Dv]`. With G the sum of the decays g on the path to a row, itself included, and
D[t, i] = exp(G_t - G_i), which is 0 unless i lies on the path to t:

    S0 = exp(G_leaf) S + sum_i exp(G_leaf - G_i) k_i d_i^T            over the rows of the last block that were accepted
    (I + A) d = beta (v - exp(G) S0^T k),   A[t, i] = beta_t D[t, i] (k_i . k_t)   for i before t
    o = exp(G) S0^T q + (D (q k^T)) d

(Yang et al., "Gated Delta Networks", 2024, in its chunked form.) The deltas d do not depend on which rows will be kept,
so they wait, with k and G, until that is known: the state is read once and written once a block, whatever it accepts.

Two kernels: one makes (I + A)^-1 beta and D (q k^T) for each head, which do not depend on the state; in the other every
program has some columns of one head's state, of which it reads `_KEYS_AT_ONCE` rows at a time. Products are fp32, each
of three TF32 products on tensor cores, whose error is close to that of fp32.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels._call import kernel_call
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
    """values: columns of the state that a program has, a power of two from 16 on that divides Dv."""

    values: int = 32
    warps: int = 4


def heuristics(shape: tuple[int, int, int, int]) -> Config:
    """A `Config` for `(sequences, value heads, Dv, rows)`: narrow columns for few sequences, to fill the device."""
    batch, heads, dim, _ = shape
    return Config(values=min(dim, 32 if batch * heads < 256 else 64))


def verify_gated_delta_net(
    rows: Rows,
    mask: Array,
    state: Array,
    layer: Array | int,
    pending: Pending,
    path: Array,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Verified:
    """Settles one layer's state, and runs the recurrence over a block without writing it.

    Value head h reads key head `h // (value_heads / key_heads)`. Rows that are not valid, and pending rows off the
    path, may hold anything.

    Args:
      rows: `L` of them for each of `B` sequences.
      mask: bool `[B, L, L]`, whether row j is on the path to row i, itself included; parents come before children. A
        row that is not on its own path is not valid: it leaves no trace, and its outputs mean nothing.
      state: fp32 or fp16 `[layers, B, value_heads, Dk, Dv]`; overwritten where the caller donates it.
      layer: an int32 scalar that a loop may count.
      pending: of the block before.
      path: bool `[B, R]`, its rows that were accepted; parents come first, here too.
      config: default `heuristics`.
      interpret: see `kernel_call`.

    Returns:
      Outputs and what is pending now; and the state with the layer's accepted rows written. The block reads the state
      as it is stored, after rounding.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
    """
    _check(rows, mask, state, pending, path)
    batch, n, heads, dim = rows.v.shape
    config = config or heuristics((batch, heads, dim, n))
    if config.values < 16 or dim % config.values:
        raise ValueError(f"{config.values} columns for a program do not divide Dv = {dim}")
    size = _matrix_size(n)
    square = jax.ShapeDtypeStruct((batch, heads, size, size), jnp.float32)
    log_decay, solve, scores = kernel_call(
        functools.partial(_terms_kernel, interpret=interpret),
        [rows.q, rows.k, rows.g, rows.beta, mask.astype(jnp.int32)],
        [jax.ShapeDtypeStruct(rows.g.shape, jnp.float32), square, square],
        name="gated_delta_net_terms",
        grid=(heads, batch),
        num_warps=config.warps,
        interpret=interpret,
    )
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    valid = jnp.diagonal(mask, axis1=1, axis2=2).astype(jnp.int32)
    operands = [layer, rows.q, rows.k, rows.v, log_decay, valid, solve, scores, *pending, path.astype(jnp.int32), state]
    like_v = jax.ShapeDtypeStruct(rows.v.shape, jnp.float32)
    out, delta, state = kernel_call(
        functools.partial(_state_kernel, config=config, interpret=interpret),
        operands,
        [like_v, like_v, jax.ShapeDtypeStruct(state.shape, state.dtype)],
        name="verify_gated_delta_net",
        grid=(dim // config.values, heads, batch),
        num_warps=config.warps,
        aliases={len(operands) - 1: 2},
        interpret=interpret,
    )
    return Verified(out, delta, log_decay, state)


def _terms_kernel(q_ref, k_ref, g_ref, beta_ref, mask_ref, log_decay_ref, solve_ref, scores_ref, *, interpret: bool):
    """All of a block that does not depend on the state, for one head."""
    dot = _product(interpret)
    head, sequence = pl.program_id(0), pl.program_id(1)
    n, heads = g_ref.shape[1:]
    key_head = lax.div(head, heads // k_ref.shape[2])
    row = lax.iota(jnp.int32, solve_ref.shape[2])
    inside = row < n
    both = inside[:, None] & inside[None, :]
    valid = triton.load(mask_ref.at[sequence, row, row], mask=inside, other=0) != 0
    # A path is a row of the mask; both orders of it are read, so that G comes along either axis.
    on_path = triton.load(mask_ref.at[sequence, row[:, None], row[None, :]], mask=both, other=0) != 0
    leads_to = triton.load(mask_ref.at[sequence, row[None, :], row[:, None]], mask=both, other=0) != 0
    g, beta = (triton.load(ref.at[sequence, row, head], mask=valid, other=0.0) for ref in (g_ref, beta_ref))
    total = jnp.sum(jnp.where(on_path, g[None, :], 0.0), axis=1)
    total_across = jnp.sum(jnp.where(leads_to, g[:, None], 0.0), axis=0)
    # The difference first, masked before exp: under strong decay the other triangle overflows.
    decay = jnp.where(on_path, jnp.exp(jnp.where(on_path, total[:, None] - total_across[None, :], 0.0)), 0.0)

    def add(i, sums):
        keys = i * width + lax.iota(jnp.int32, width)
        k, q = (_load_rows(r.at[sequence, row[:, None], key_head, keys[None, :]], valid) for r in (k_ref, q_ref))
        return sums[0] + dot(k, k, trans_b=True), sums[1] + dot(q, k, trans_b=True)

    width = min(k_ref.shape[3], _KEYS_AT_ONCE)
    kk, qk = lax.fori_loop(0, k_ref.shape[3] // width, add, (jnp.zeros_like(decay), jnp.zeros_like(decay)))
    inverse = _unit_lower_inverse(beta[:, None] * decay * kk, row, dot)
    triton.store(solve_ref.at[sequence, head, :, :], inverse * beta[None, :])
    triton.store(scores_ref.at[sequence, head, :, :], decay * qk)
    triton.store(log_decay_ref.at[sequence, row, head], total, mask=inside)


def _state_kernel(
    layer_ref,
    q_ref,
    k_ref,
    v_ref,
    total_ref,
    valid_ref,
    solve_ref,
    scores_ref,
    key_ref,
    delta_ref,
    log_decay_ref,
    path_ref,
    state_ref,
    out_ref,
    new_delta_ref,
    new_state_ref,
    *,
    config: Config,
    interpret: bool,
):
    """The accepted rows of the last block, and the rows of this one, on some columns of one head's state."""
    dot = _product(interpret)
    layer, head, sequence = layer_ref[0], pl.program_id(1), pl.program_id(2)
    key_head = lax.div(head, v_ref.shape[2] // k_ref.shape[2])
    values = pl.program_id(0) * config.values + lax.iota(jnp.int32, config.values)
    n, pending_rows = v_ref.shape[1], path_ref.shape[1]
    row, old = lax.iota(jnp.int32, solve_ref.shape[2]), lax.iota(jnp.int32, _matrix_size(pending_rows))
    inside = row < n

    # What the last block adds to the state: keys, and deltas with their weights.
    kept = triton.load(path_ref.at[sequence, old], mask=old < pending_rows, other=0) != 0
    old_decay = triton.load(log_decay_ref.at[layer, sequence, old, head], mask=kept, other=0.0)
    leaf = jnp.max(jnp.where(kept, old, -1))  # parents come first
    last = jnp.sum(jnp.where(old == leaf, old_decay, 0.0))
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - old_decay, 0.0)), 0.0)
    old_delta = _load_rows(delta_ref.at[layer, sequence, old[:, None], head, values[None, :]], kept)
    old_delta = old_delta * weight[:, None]

    valid = triton.load(valid_ref.at[sequence, row], mask=inside, other=0) != 0
    v = _load_rows(v_ref.at[sequence, row[:, None], head, values[None, :]], valid)

    def read(i, sums):
        keys = i * width + lax.iota(jnp.int32, width)
        place = (layer, sequence, head, keys[:, None], values[None, :])
        state = triton.load(state_ref.at[place]).astype(jnp.float32)
        old_key = _load_rows(key_ref.at[layer, sequence, old[:, None], key_head, keys[None, :]], kept)
        state = (jnp.exp(last) * state + dot(old_key, old_delta, trans_a=True)).astype(state_ref.dtype)
        triton.store(new_state_ref.at[place], state)
        state = state.astype(jnp.float32)
        k, q = (_load_rows(r.at[sequence, row[:, None], key_head, keys[None, :]], valid) for r in (k_ref, q_ref))
        return sums[0] + dot(k, state), sums[1] + dot(q, state)

    width = min(k_ref.shape[3], _KEYS_AT_ONCE)
    read_k, read_q = lax.fori_loop(0, k_ref.shape[3] // width, read, (jnp.zeros_like(v), jnp.zeros_like(v)))
    from_state = jnp.exp(triton.load(total_ref.at[sequence, row, head], mask=valid, other=0.0))[:, None]
    delta = dot(triton.load(solve_ref.at[sequence, head, :, :]), v - from_state * read_k)
    out = from_state * read_q + dot(triton.load(scores_ref.at[sequence, head, :, :]), delta)
    place = (sequence, row[:, None], head, values[None, :])
    mask = jnp.broadcast_to(inside[:, None], out.shape)
    triton.store(out_ref.at[place], out, mask=mask)
    triton.store(new_delta_ref.at[place], delta, mask=mask)


def _product(interpret: bool):
    """fp32 in all but a few of its bits."""
    return functools.partial(triton.dot, precision=HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3)


def _load_rows(place, kept: Array) -> Array:
    """`[rows, columns]`, zero where not kept."""
    return triton.load(place, mask=jnp.broadcast_to(kept[:, None], place.shape), other=0.0)


def _matrix_size(rows: int) -> int:
    """Rows of a matrix that a tensor core takes, at least `rows`."""
    return max(16, 1 << (rows - 1).bit_length())


def _unit_lower_inverse(a: Array, row: Array, dot) -> Array:
    """`(I + A)^-1` for the part A of `a [n, n]` below the diagonal; `row` counts to n, a power of two.

    Block forward substitution: inverses of diagonal blocks of one size give those of twice the size, whose corner is
    -X22 A21 X11. It stays as accurate as solving row by row, and takes as many steps as n has binary digits.
    """
    inverse = jnp.where(row[:, None] == row[None, :], 1.0, 0.0)
    size = 1
    while size < row.size:
        block, half = lax.div(row, jnp.full_like(row, 2 * size)), lax.div(row, jnp.full_like(row, size))
        corner = (block[:, None] == block[None, :]) & (half[:, None] > half[None, :])
        step = jnp.where(corner, a, 0.0)
        inverse = inverse - (step if size == 1 else dot(dot(inverse, step), inverse))
        size *= 2
    return inverse


def verify_gated_delta_net_reference(
    rows: Rows, mask: Array, state: Array, layer: Array | int, pending: Pending, path: Array
) -> Verified:
    """What `verify_gated_delta_net` must equal, solved row by row."""
    n, heads = rows.v.shape[1:3]
    group = heads // rows.k.shape[2]
    valid = jnp.diagonal(mask, axis1=1, axis2=2)
    q, k, v, g, beta = (
        jnp.where(valid.reshape(*valid.shape, *[1] * (t.ndim - 2)), t, 0.0).swapaxes(1, 2)
        if t.ndim == 4
        else jnp.where(valid[..., None], t, 0.0).swapaxes(1, 2)
        for t in rows
    )  # [B, heads, L, ...]
    q, k = (jnp.repeat(t, group, axis=1) for t in (q, k))

    key, delta, log_decay = (t[layer].swapaxes(1, 2) for t in pending)
    kept = path[:, None]  # [B, 1, R]
    leaf = jnp.max(jnp.where(kept, jnp.arange(path.shape[1]), -1), axis=-1, keepdims=True, initial=-1)
    last = jnp.sum(jnp.where(jnp.arange(path.shape[1]) == leaf, log_decay, 0.0), axis=-1, keepdims=True)
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - log_decay, 0.0)), 0.0)
    key = jnp.where(kept[..., None], jnp.repeat(key, group, axis=1), 0.0)
    delta = jnp.where(kept[..., None], delta, 0.0) * weight[..., None]
    settled = jnp.exp(last)[..., None] * state[layer].astype(jnp.float32) + _einsum("bhrk,bhrv->bhkv", key, delta)
    settled = settled.astype(state.dtype)
    state = state.at[layer].set(settled)
    settled = settled.astype(jnp.float32)

    on_path = mask[:, None]
    total = _einsum("bij,bhj->bhi", mask.astype(jnp.float32), g)
    decay = jnp.where(on_path, jnp.exp(jnp.where(on_path, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
    from_state = jnp.exp(total)[..., None]
    a = beta[..., None] * decay * jnp.tril(_einsum("bhik,bhjk->bhij", k, k), -1)
    right = beta[..., None] * (v - from_state * _einsum("bhik,bhkv->bhiv", k, settled))

    def solve(i, delta):
        return delta.at[:, :, i].set(right[:, :, i] - _einsum("bhj,bhjv->bhv", a[:, :, i], delta))

    delta = lax.fori_loop(0, n, solve, jnp.zeros_like(right))
    scores = decay * _einsum("bhik,bhjk->bhij", q, k)
    out = from_state * _einsum("bhik,bhkv->bhiv", q, settled) + _einsum("bhij,bhjv->bhiv", scores, delta)
    return Verified(*(t.swapaxes(1, 2) for t in (out, delta, total)), state)


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=HIGHEST)


def _check(rows: Rows, mask: Array, state: Array, pending: Pending, path: Array) -> None:
    layers, batch, heads, keys, dim = state.shape
    n, key_heads, waiting = rows.k.shape[1], rows.k.shape[2], path.shape[-1]
    if state.dtype not in (jnp.float32, jnp.float16):
        raise ValueError(f"state must be float32 or float16, got {state.dtype}")
    if (
        not 1 <= n <= MAX_ROWS
        or not 1 <= waiting <= MAX_ROWS
        or heads % key_heads
        or any(d < 16 or d & (d - 1) for d in (keys, dim))
    ):
        raise ValueError(
            f"blocks of 1 to {MAX_ROWS} rows, value heads a multiple of key heads, and Dk and Dv powers of two from "
            f"16 on; got {n} and {waiting} rows, {heads} and {key_heads} heads, {keys} and {dim}"
        )
    expected = {
        "q": (rows.q, (batch, n, key_heads, keys)),
        "k": (rows.k, (batch, n, key_heads, keys)),
        "v": (rows.v, (batch, n, heads, dim)),
        "g": (rows.g, (batch, n, heads)),
        "beta": (rows.beta, (batch, n, heads)),
        "pending key": (pending.key, (layers, batch, waiting, key_heads, keys)),
        "pending delta": (pending.delta, (layers, batch, waiting, heads, dim)),
        "pending log_decay": (pending.log_decay, (layers, batch, waiting, heads)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32{list(shape)}, got {array.dtype}{list(array.shape)}")
    for name, array, shape in (("mask", mask, (batch, n, n)), ("path", path, (batch, waiting))):
        if array.shape != shape or array.dtype != jnp.bool_:
            raise ValueError(f"{name} must be bool{list(shape)}, got {array.dtype}{list(array.shape)}")
