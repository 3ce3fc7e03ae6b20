"""Gated DeltaNet over long sequences, 64 rows at a time, from one state to the next.

With k and q normalised, S the state `[Dk, Dv]` before a chunk of a value head, G the running sum of g in the chunk, and
D[t, i] = exp(G_t - G_i) for i up to t, else 0:

    X = (I + A)^-1,   A[t, i] = beta_t D[t, i] (k_i . k_t)   for i before t
    d = X beta (v - exp(G) S^T k)
    o = exp(G) S^T q + P d,   P = D (q k^T)
    next S = exp(G_last) S + sum_i exp(G_last - G_i) k_i d_i^T

(Yang et al., "Gated Delta Networks", 2024.) Three kernels. One makes A and P, a program for each chunk of a head. One
turns A into X where it is, a warp for each, which solves in blocks of 16 rows. The last goes through the chunks, a
program for some columns of one head's state, which it keeps in registers: no state between chunks reaches memory.

Precision. k and q arrive as the convolution left them, in half precision, and are never rounded again: their norms are
factors of rows, in fp32, so k k^T and q k^T are exact products of half precision. The solve is fp32 (three TF32
products): it amplifies what its matrix lacks. What leads into the state takes both halves of an fp32 factor, its value
in half precision and what that leaves over, a relative error of 2^-16: S^T k and the sum into S two products, X times
its right side three. What leads to o alone, S^T q and P d, takes one: o is rounded to half precision next. S itself is
fp32.
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
from pallas_kernels._delta_rule import product, takes_heads, unit_lower_inverse
from pallas_kernels._instructions import HIGHEST
from pallas_kernels.device import Device, current_device

Array = jax.Array

CHUNK = 64
_BLOCK = 16  # rows solved as one matrix
_EPSILON = 1e-6  # inside the root of a norm, as in flash-linear-attention


@dataclasses.dataclass(frozen=True)
class Config:
    """How the pass through the chunks is cut up.

    values: columns of a state that a program has, a power of two from 16 on that divides Dv.
    """

    values: int
    warps: int


def heuristics(values: int, device: Device) -> Config:
    """A `Config` for heads of Dv: as many columns as registers allow without a spill.

    On Hopper eight warps would be two groups for its own matrix instructions, which leave fewer registers.
    """
    return Config(min(values, 16), 4 if device.compute_capability >= (9, 0) else 8)


class Prefilled(NamedTuple):
    """out: `[B, L, value_heads, Dv]` in the dtype of q; state: fp32 `[B, value_heads, Dk, Dv]`."""

    out: Array
    state: Array


def prefill_gated_delta_net(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    valid: Array,
    state: Array,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Prefilled:
    """The recurrence over the valid rows of `B` sequences, from `state` on.

    Value head h reads key head `h // (value_heads / key_heads)`. Rows that are not valid, anywhere, may hold anything;
    they leave no trace, and their outputs mean nothing.

    Args:
      q, k: `[B, L, key_heads, Dk]` in bf16, fp16 or fp32, not normalised: here q becomes `q / |q| / sqrt(Dk)` and k
        `k / |k|`, with 1e-6 inside the root.
      v: `[B, L, value_heads, Dv]`, of the same dtype.
      g, beta: fp32 `[B, L, value_heads]`; g, the logarithm of the decay, is at most 0.
      valid: bool `[B, L]`.
      state: fp32 `[B, value_heads, Dk, Dv]`.
      config: default `heuristics` of the current device.
      interpret: see `kernel_call`.

    Raises:
      ValueError: shapes, dtypes or config do not fit each other.
    """
    _check(q, k, v, g, beta, valid, state)
    batch, n, heads, dim = v.shape
    config = config or heuristics(dim, current_device())
    if config.values < 16 or dim % config.values:
        raise ValueError(f"{config.values} columns for a program do not divide Dv = {dim}")
    chunks = -(-n // CHUNK)
    # Not in the kernels: XLA does it where it makes these arrays.
    q, k, v, g, beta = (_whole_chunks(t, valid, chunks * CHUNK) for t in (q, k, v, g, beta))
    square, rows = (batch, heads, chunks, CHUNK, CHUNK), (batch, heads, chunks, CHUNK)
    lower, scores, *factors = kernel_call(
        functools.partial(_terms_kernel, interpret=interpret),
        [q, k, g, beta],
        [
            jax.ShapeDtypeStruct(square, jnp.float32),
            jax.ShapeDtypeStruct(square, q.dtype),
            *[jax.ShapeDtypeStruct(rows, jnp.float32)] * 3,
            jax.ShapeDtypeStruct(rows[:3], jnp.float32),
        ],
        name="gated_delta_net_terms",
        grid=(chunks, heads, batch),
        num_warps=8,
        interpret=interpret,
    )
    solve = kernel_call(
        functools.partial(_solve_kernel, interpret=interpret),
        [lower],
        jax.ShapeDtypeStruct(square, jnp.float32),
        name="gated_delta_net_solve",
        grid=(chunks, heads, batch),
        num_warps=1,
        aliases={0: 0},
        interpret=interpret,
    )
    operands = [q, k, v, beta, solve, scores, *factors, state]
    out, state = kernel_call(
        functools.partial(_scan_kernel, config=config, interpret=interpret),
        operands,
        [jax.ShapeDtypeStruct(v.shape, q.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)],
        name="prefill_gated_delta_net",
        grid=(dim // config.values, heads, batch),
        num_warps=config.warps,
        aliases={len(operands) - 1: 1},
        interpret=interpret,
    )
    return Prefilled(out[:, :n], state)


def _whole_chunks(t: Array, valid: Array, rows: int) -> Array:
    """`t [B, L, ...]` with as many rows, those that are not valid zero, which changes nothing."""
    t = jnp.where(valid.reshape(*valid.shape, *[1] * (t.ndim - 2)), t, 0)
    return jnp.pad(t, ((0, 0), (0, rows - t.shape[1]), *[(0, 0)] * (t.ndim - 2)))


def _terms_kernel(
    q_ref,
    k_ref,
    g_ref,
    beta_ref,
    lower_ref,
    scores_ref,
    key_in_ref,
    query_in_ref,
    key_out_ref,
    decay_ref,
    *,
    interpret: bool,
):
    """A and P of one chunk of a head, the chunk's decay, and factors of its rows.

    Those are of k and of q where the state is read, and of k where it is written: decays and norms.
    """
    chunk, head, sequence = (pl.program_id(axis) for axis in range(3))
    heads, keys = g_ref.shape[2], k_ref.shape[3]
    key_head = lax.div(head, heads // k_ref.shape[2])
    columns, local = lax.iota(jnp.int32, keys), lax.iota(jnp.int32, CHUNK)
    rows = chunk * CHUNK + local

    def load(ref):  # as it is, and what normalises its rows
        block = triton.load(ref.at[sequence, rows[:, None], key_head, columns[None, :]])
        exact = block.astype(jnp.float32)
        return block, lax.rsqrt(jnp.sum(exact * exact, axis=1) + _EPSILON)

    (q, q_norm), (k, k_norm) = load(q_ref), load(k_ref)
    q_norm = q_norm * keys**-0.5
    g, beta = (triton.load(ref.at[sequence, rows, head]) for ref in (g_ref, beta_ref))
    after = local[:, None] >= local[None, :]
    total = jnp.sum(jnp.where(after, g[None, :], 0.0), axis=1)
    last = jnp.sum(g)
    # The difference first, masked before exp: under strong decay the other triangle overflows.
    decay = jnp.where(after, jnp.exp(jnp.where(after, total[:, None] - total[None, :], 0.0)), 0.0)
    decay = decay * k_norm[None, :]
    place = (sequence, head, chunk)
    square = (*place, local[:, None], local[None, :])
    scores = _exact(q, k, interpret=interpret, trans_b=True) * (decay * q_norm[:, None])
    triton.store(scores_ref.at[square], scores.astype(scores_ref.dtype))
    triton.store(
        lower_ref.at[square], _exact(k, k, interpret=interpret, trans_b=True) * (decay * (beta * k_norm)[:, None])
    )
    triton.store(key_in_ref.at[*place, local], jnp.exp(total) * k_norm)
    triton.store(query_in_ref.at[*place, local], jnp.exp(total) * q_norm)
    triton.store(key_out_ref.at[*place, local], jnp.exp(last - total) * k_norm)
    triton.store(decay_ref.at[place], jnp.exp(last))


def _solve_kernel(lower_ref, solve_ref, *, interpret: bool):
    """`(I + A)^-1` for the part A of a chunk's matrix below the diagonal; what is above it is zero already.

    By blocks of rows, with X the inverse: X_ij = -X_ii sum_m A_im X_mj over m from j to i - 1.
    """
    dot, local = product(interpret), lax.iota(jnp.int32, _BLOCK)
    chunk, head, sequence = (pl.program_id(axis) for axis in range(3))

    def place(i, j):
        return sequence, head, chunk, i * _BLOCK + local[:, None], j * _BLOCK + local[None, :]

    inverse = []
    for i in range(CHUNK // _BLOCK):
        lower = [triton.load(lower_ref.at[place(i, j)]) for j in range(i + 1)]
        corner = unit_lower_inverse(lower[i], local, dot)
        before = [sum(dot(lower[m], inverse[m][j]) for m in range(j, i)) for j in range(i)]
        inverse.append([*(-dot(corner, block) for block in before), corner])
        for j, block in enumerate(inverse[i]):
            triton.store(solve_ref.at[place(i, j)], block)


def _scan_kernel(
    q_ref,
    k_ref,
    v_ref,
    beta_ref,
    solve_ref,
    scores_ref,
    key_in_ref,
    query_in_ref,
    key_out_ref,
    decay_ref,
    state_ref,
    out_ref,
    new_state_ref,
    *,
    config: Config,
    interpret: bool,
):
    """Some columns of one head's state, through all chunks."""
    head, sequence = pl.program_id(1), pl.program_id(2)
    key_head = lax.div(head, v_ref.shape[2] // k_ref.shape[2])
    keys, local = lax.iota(jnp.int32, k_ref.shape[3]), lax.iota(jnp.int32, CHUNK)
    values = pl.program_id(0) * config.values + lax.iota(jnp.int32, config.values)
    dtype, exact = q_ref.dtype, functools.partial(_exact, interpret=interpret)

    def step(chunk, state):
        place, rows = (sequence, head, chunk), chunk * CHUNK + local
        row, column = (
            (sequence, rows[:, None], key_head, keys[None, :]),
            (sequence, rows[:, None], head, values[None, :]),
        )

        def factor(ref):
            return triton.load(ref.at[*place, local])[:, None]

        def matrix(ref):
            return triton.load(ref.at[*place, local[:, None], local[None, :]])

        k, halves = triton.load(k_ref.at[row]), _halves(state, dtype)
        v = triton.load(v_ref.at[column]).astype(jnp.float32)
        beta = triton.load(beta_ref.at[sequence, rows, head])[:, None]
        right = beta * (v - factor(key_in_ref) * sum(exact(k, half) for half in halves))
        delta = _product(_halves(matrix(solve_ref), dtype), _halves(right, dtype), exact)
        read = exact(triton.load(q_ref.at[row]), halves[0])
        out = factor(query_in_ref) * read + exact(matrix(scores_ref), delta.astype(dtype))
        triton.store(out_ref.at[column], out.astype(dtype))
        added = sum(exact(k, half, trans_a=True) for half in _halves(factor(key_out_ref) * delta, dtype))
        return triton.load(decay_ref.at[place]) * state + added

    place = (sequence, head, keys[:, None], values[None, :])
    state = lax.fori_loop(0, solve_ref.shape[2], step, triton.load(state_ref.at[place]))
    triton.store(new_state_ref.at[place], state)


def _halves(t: Array, dtype) -> list[Array]:
    """fp32 numbers as a sum, of two of half precision, or of one if `dtype` is fp32: the first is their value in it."""
    if dtype == jnp.float32:
        return [t]
    half = t.astype(dtype)
    return [half, (t - half.astype(jnp.float32)).astype(dtype)]


def _product(a: list[Array], b: list[Array], exact) -> Array:
    """Of two sums of as many terms, without what is too small to matter."""
    return sum(exact(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < len(a))


def _exact(a: Array, b: Array, *, interpret: bool, **transposed) -> Array:
    """The product of matrices of one dtype, summed in fp32."""
    if interpret or a.dtype == jnp.float32:
        return product(interpret)(a.astype(jnp.float32), b.astype(jnp.float32), **transposed)
    return triton.dot(a, b, **transposed)


def prefill_gated_delta_net_reference(
    q: Array, k: Array, v: Array, g: Array, beta: Array, valid: Array, state: Array
) -> Prefilled:
    """What `prefill_gated_delta_net` must equal: the recurrence row by row, in fp32."""
    group = v.shape[2] // k.shape[2]

    def rows(t):  # [L, B, heads, ...] fp32, zero where not valid, which changes nothing
        t = jnp.where(valid.reshape(*valid.shape, *[1] * (t.ndim - 2)), t, 0.0).astype(jnp.float32)
        return t.swapaxes(0, 1)

    def normalised(t):
        t = jnp.repeat(rows(t), group, axis=2)
        return t * lax.rsqrt(jnp.sum(t * t, axis=-1, keepdims=True) + _EPSILON)

    def step(state, row):
        q, k, v, g, beta = row
        state = jnp.exp(g)[..., None, None] * state
        delta = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k, precision=HIGHEST))
        state = state + k[..., None] * delta[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision=HIGHEST)

    inputs = normalised(q) * q.shape[-1] ** -0.5, normalised(k), *map(rows, (v, g, beta))
    state, out = lax.scan(step, state, inputs)
    return Prefilled(out.swapaxes(0, 1).astype(q.dtype), state)


def _check(q: Array, k: Array, v: Array, g: Array, beta: Array, valid: Array, state: Array) -> None:
    batch, heads, keys, dim = state.shape
    n, key_heads = k.shape[1:3]
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"q must be bfloat16, float16 or float32, got {q.dtype}")
    if n < 1 or heads % key_heads or not takes_heads(keys, dim):
        raise ValueError(
            "at least one row, value heads a multiple of key heads, and Dk and Dv powers of two from 16 on; "
            f"got {n} rows, {heads} and {key_heads} heads, {keys} and {dim}"
        )
    for name, array, shape, dtype in (
        ("q", q, (batch, n, key_heads, keys), q.dtype),
        ("k", k, (batch, n, key_heads, keys), q.dtype),
        ("v", v, (batch, n, heads, dim), q.dtype),
        ("g", g, (batch, n, heads), jnp.float32),
        ("beta", beta, (batch, n, heads), jnp.float32),
        ("valid", valid, (batch, n), jnp.bool_),
        ("state", state, (batch, heads, keys, dim), jnp.float32),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype).name}{list(shape)}, got {array.dtype}{list(array.shape)}"
            )
