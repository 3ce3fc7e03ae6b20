"""GPTQ: integers for a weight matrix that keep its outputs, given the second moment of its inputs.

Columns are rounded one after the other, and each sees the errors made so far. With `H = R R^T`, R upper triangular,
the squared error of the outputs of a row with weight errors e is

    e H e^T = |e R|^2 = sum_k R_kk^2 (e_k + sum_{j<k} e_j C_jk)^2,      C = R diag(R)^-1

so column k is rounded not at w_k but at w_k + sum_{j<k} e_j C_jk. This is the form of GPTQ (Frantar et al.,
arXiv 2210.17323) that QuIP (Chee et al., arXiv 2307.13304) proved equal to it. It needs one Cholesky factor of H
itself where the first paper factors the inverse, so nothing is inverted and no triangular system is solved.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from qwen38_jax.quantization.tensor import (
    QuantTensor,
    code_values,
    dequantize,
    fit_grid,
    nearest_codes,
    pack,
    quant_tensor,
)

Array = jax.Array

_LOG = logging.getLogger(__name__)
_HIGHEST = lax.Precision.HIGHEST  # or a GPU multiplies fp32 as TF32

_BLOCK = 128  # columns whose errors reach the later ones in one product, where groups do not say how many
_CHUNK_BYTES = 512 << 20  # of weights in fp32 that are quantised at a time; a few times as much is in use
_SHRINKS = tuple(round(1 - 0.02 * i, 2) for i in range(20))  # parts of a group's range that clip search tries
_LEAST_DAMPING, _MOST_DAMPING = 1e-4, 10.0


@struct.dataclass
class Hessian:
    """Second moment of the rows that a linear layer reads, up to a factor the Hessian of its squared output error.

    matrix: fp32 `[K, K]`, the mean of x^T x. rows: int32, how many rows it is the mean of.
    """

    matrix: Array
    rows: Array


def empty_hessian(columns: int) -> Hessian:
    """The second moment of no rows of `columns` values."""
    return Hessian(jnp.zeros((columns, columns), jnp.float32), jnp.zeros((), jnp.int32))


def add_rows(hessian: Hessian, x: Array, valid: Array | None = None) -> Hessian:
    """Takes in activations `x [..., K]`. The given `hessian` is donated: its memory becomes that of the result.

    Products of fp32 rows are fp32 throughout; those of half precision are exact, and summed in fp32.

    Args:
      valid: bool `[...]`, the rows that count; None for all. What the others hold, NaN included, leaves no trace.

    Raises:
      ValueError: x has another width, or some of its valid rows are not finite; the message has their number.
    """
    columns = hessian.matrix.shape[0]
    if x.shape[-1] != columns:
        raise ValueError(f"activations {list(x.shape)} are not rows of {columns} values, as the Hessian's are")
    valid = jnp.ones(x.shape[:-1], bool) if valid is None else valid
    hessian, damaged = _add_rows(hessian, x.reshape(-1, columns), valid.reshape(-1))
    if damaged:
        raise ValueError(
            f"{int(damaged):,} of {int(valid.sum()):,} activation rows hold NaN or infinity: the model that made them "
            "is broken, or its dtype overflows; nothing can be calibrated on them"
        )
    return hessian


@functools.partial(jax.jit, donate_argnums=0)
def _add_rows(hessian: Hessian, x: Array, valid: Array) -> tuple[Hessian, Array]:
    """The mean over more rows, and how many of the valid ones are not finite."""
    damaged = jnp.sum(valid & ~jnp.isfinite(x).all(axis=1))
    x = jnp.where(valid[:, None], x, 0)
    rows = hessian.rows + jnp.sum(valid, dtype=jnp.int32)
    share = 1 / jnp.maximum(rows, 1).astype(jnp.float32)
    moment = jnp.einsum("nk,nl->kl", x, x, precision=_HIGHEST, preferred_element_type=jnp.float32)
    matrix = hessian.matrix * (hessian.rows * share) + moment * share  # a mean: sums would grow without bound
    return Hessian(matrix, rows), damaged


@dataclasses.dataclass(frozen=True)
class GptqReport:
    """How a matrix was quantised.

    Attributes:
      output_error: |(W - Wq) X^T| / |W X^T| (Frobenius) over the rows X behind the Hessian.
      damping: the damping used, which is more than was asked for where that was too little.
      dead_columns: how many inputs were always 0. Their weights are rounded to nearest.
    """

    output_error: float
    damping: float
    dead_columns: int


def gptq(
    w: Array,
    hessian: Array,
    *,
    bits: int,
    group: int | None,
    symmetric: bool = True,
    damping: float = 0.01,
    act_order: bool = False,
    clip_search: bool = False,
    scale_dtype: str = "float16",
    chunk_rows: int | None = None,
) -> tuple[QuantTensor, GptqReport]:
    """Quantises a matrix `w [N, K]` of finite values, on grids as `quantize` makes them.

    Rows do not influence each other, so matrices that read the same activations may be stacked into one `w`. A column
    of zeros in the Hessian, an input never seen, has nothing to trade against: its weights are rounded to nearest,
    which costs no more than the zeros that others write there and is right if the input appears after all.

    Args:
      hessian: fp32 `[K, K]`, `Hessian.matrix`.
      group: columns that share a scale; None for one scale per row. A group's scale is chosen when its first column is
        reached, for the weights as they have become by then.
      damping: added to the diagonal, as a part of its mean (without zeros). What makes no Cholesky factor is tried
        again with ten times as much, which is logged as a warning.
      act_order: quantise the columns of largest second moment first. Groups remain those of neighbouring columns
        ("static groups", scales from the weights as given): no kernel then has to look up the group of a column, and
        the file is an ordinary one.
      clip_search: for every group, try ranges down to 0.62 of the full one and take the one with the least squared
        error of the weights, each weighted by its second moment.
      chunk_rows: rows quantised at a time; None takes what bounds the memory to some 2 GB.

    Raises:
      ValueError: shapes do not fit, bits or groups are impossible, a value is not finite, or the Hessian is none: it
        has no Cholesky factor even with a damping of 10.
    """
    group = w.shape[-1] if group is None else group
    _check(w, hessian, bits, group, damping)
    columns = w.shape[1]
    diagonal = jnp.diagonal(hessian)
    order = jnp.argsort(-diagonal, stable=True) if act_order else jnp.arange(columns)
    coupling, damping = _coupling(hessian, order, damping)
    grid = _Grid(bits, group, symmetric, clip_search, scale_dtype, static=act_order or group == columns)

    def rows(w):
        return _quantize_rows(w, coupling, diagonal, order, grid=grid)

    codes, scales, zeros = map_rows(rows, w, columns, chunk_rows)
    quantised = quant_tensor(codes, scales, zeros, bits=bits, dtype=w.dtype.name)
    error = output_error(w, quantised, hessian, chunk_rows=chunk_rows)
    if not math.isfinite(error):
        raise ValueError(f"w holds values that are not finite, or too large for scales in {scale_dtype}")
    return quantised, GptqReport(error, damping, int(jnp.sum(diagonal == 0)))


def output_error(w: Array, quantised: QuantTensor, hessian: Array, *, chunk_rows: int | None = None) -> float:
    """`|(W - Wq) X^T| / |W X^T|` (Frobenius) of `w [N, K]`, told from the second moment `[K, K]` of X; 0 if that is 0.

    NaN if a weight or a scale is not finite.
    """

    def energies(pair):
        w, part = pair
        return _energies(w, part.replace(group_of=quantised.group_of), hessian)

    pair = w, quantised.replace(group_of=None)  # which is no row
    lost, whole = (np.asarray(t, np.float64).sum() for t in map_rows(energies, pair, w.shape[1], chunk_rows))
    return float(np.sqrt(max(lost, 0) / whole)) if whole != 0 else 0.0


def map_rows(function: Callable[[Any], Any], tree: Any, columns: int, chunk_rows: int | None = None) -> Any:
    """`function`, which treats rows alike, of a pytree of arrays `[N, ...]`: of a chunk of the rows at a time.

    For functions of a matrix `[N, columns]` whose work space would be several times a large matrix. All chunks have one
    size, so that one program serves them; the last may begin inside the one before it.

    Args:
      chunk_rows: most rows of a chunk; None takes what makes 512 MB in fp32.
    """
    n = len(jax.tree.leaves(tree)[0])
    most = max(1, _CHUNK_BYTES // (4 * columns)) if chunk_rows is None else chunk_rows
    count = -(-n // most)
    size = -(-n // count)
    parts = [function(_rows(tree, min(i * size, n - size), size)) for i in range(count)]
    repeated = count * size - n

    def join(*chunks):
        return jnp.concatenate([*chunks[:-1], chunks[-1][repeated:]])

    return parts[0] if count == 1 else jax.tree.map(join, *parts)


@functools.partial(jax.jit, static_argnames="size")
def _rows(tree: Any, start: int, size: int) -> Any:
    return jax.tree.map(lambda t: lax.dynamic_slice_in_dim(t, start, size), tree)


def _check(w: Array, hessian: Array, bits: int, group: int, damping: float) -> None:
    if w.ndim != 2 or hessian.shape != (w.shape[1], w.shape[1]):
        raise ValueError(f"a matrix {list(w.shape)} and a Hessian {list(hessian.shape)} are not [N, K] and [K, K]")
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if group < 1 or w.shape[1] % group or w.shape[1] * bits % 8:
        raise ValueError(f"groups of {group} at {bits} bits do not divide rows of {w.shape[1]} values")
    if not 0 <= damping <= _MOST_DAMPING:
        raise ValueError(f"damping must be in [0, {_MOST_DAMPING:g}], got {damping}")
    if not jnp.isfinite(hessian).all() or (jnp.diagonal(hessian) < 0).any():
        raise ValueError("the Hessian holds NaN, infinity or a negative second moment: it is not one of activations")


# ---- the factor ----


def _coupling(hessian: Array, order: Array, damping: float) -> tuple[Array, float]:
    """C of the damped Hessian, columns in the given order, less its unit diagonal; and the damping that it took."""
    while damping <= _MOST_DAMPING:
        coupling, sound = _factor(hessian, order, damping)
        if sound:
            return coupling, damping
        more = max(10 * damping, _LEAST_DAMPING)
        _LOG.warning("the Hessian has no Cholesky factor with damping %g: trying %g", damping, more)
        damping = more
    raise ValueError(
        f"the Hessian has no Cholesky factor even with a damping of {_MOST_DAMPING:g}, so it is not the second moment "
        "of any activations: accumulate it anew, in fp32"
    )


@jax.jit
def _factor(hessian: Array, order: Array, damping: Array) -> tuple[Array, Array]:
    """C `[K, K]`, strictly upper, and whether it can be trusted."""
    h = hessian[order][:, order]
    diagonal = jnp.diagonal(h)
    live = diagonal > 0
    mean = jnp.sum(diagonal) / jnp.maximum(jnp.sum(live), 1)
    # A dead column is coupled to none, so that any positive number will do for it.
    h = h + jnp.diag(jnp.where(live, damping * mean, jnp.where(mean > 0, mean, 1)))
    upper = jnp.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]  # h = upper @ upper.T
    pivots = jnp.diagonal(upper)
    # A failure is NaN. It may also go unnoticed, when rounding leaves a little of what should have become 0.
    rounding = 4 * jnp.finfo(jnp.float32).eps * jnp.diagonal(h)
    sound = jnp.isfinite(upper).all() & (pivots**2 > rounding).all()
    return jnp.triu(upper / pivots, 1), sound


# ---- the rows ----


@dataclasses.dataclass(frozen=True)
class _Grid:
    """What codes and scales to make. `static`: scales are those of the weights as given."""

    bits: int
    group: int
    symmetric: bool
    clip_search: bool
    scale_dtype: str
    static: bool

    def fit(self, values: Array, importance: Array) -> tuple[Array, Array | None]:
        """Scales and zero points `[...]` of groups of fp32 `values [..., group]`, of which each counts `importance`."""
        fit = functools.partial(fit_grid, values, self.bits, self.symmetric, self.scale_dtype)
        if not self.clip_search:
            return fit()

        def try_range(best, shrink):
            scales, zeros = fit(shrink)
            each = scales[..., None], None if zeros is None else zeros[..., None]
            error = values - code_values(nearest_codes(values, *each, self.bits), *each)
            candidate = jnp.sum(importance * error**2, axis=-1), scales, zeros
            return jax.tree.map(functools.partial(jnp.where, candidate[0] < best[0]), candidate, best), None

        start = jnp.full(values.shape[:-1], jnp.inf), *fit()
        return lax.scan(try_range, start, jnp.array(_SHRINKS))[0][1:]


@functools.partial(jax.jit, static_argnames="grid")
def _quantize_rows(
    w: Array, coupling: Array, importance: Array, order: Array, *, grid: _Grid
) -> tuple[Array, Array, Array | None]:
    """Packed codes `[N, K * bits / 8]`, scales and zero points `[N, K / group]` of rows `w [N, K]`."""
    n, k = w.shape
    groups = k // grid.group
    span = math.gcd(k, _BLOCK) if grid.static else grid.group
    # From here on a row of an array is a column of the matrix, so that one column is contiguous.
    columns = w.astype(jnp.float32).T
    importance = importance.reshape(groups, grid.group)
    grids = grid.fit(columns.T.reshape(n, groups, grid.group), importance)
    grids = jax.tree.map(lambda t: t.T if grid.static else jnp.zeros_like(t.T), grids)  # or to be filled in
    columns, group_of = columns[order], order // grid.group
    settled = None if grid.static else _settled(coupling, span)

    def block(b, carry):
        errors, codes, grids = carry
        here = functools.partial(lax.dynamic_slice_in_dim, start_index=b * span, slice_size=span)
        given, reach = here(columns), here(coupling, axis=1)
        shift = jnp.matmul(reach.T, errors, precision=_HIGHEST)
        if not grid.static:  # the block is a group
            expected = given + jnp.matmul(settled[b].T, shift, precision=_HIGHEST)
            fitted = grid.fit(expected.T, importance[b])
            grids = jax.tree.map(lambda t, new: t.at[b].set(new), grids, fitted)
        each = jax.tree.map(lambda t: t[here(group_of)], grids)
        new = _round_columns(given, given + shift, here(reach), *each, grid.bits)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=b * span, axis=0)
        return put(errors, given - code_values(new, *each)), put(codes, new), grids

    carry = jnp.zeros_like(columns), jnp.zeros(columns.shape, jnp.int8), grids
    _, codes, (scales, zeros) = lax.fori_loop(0, k // span, block, carry)
    codes = jnp.zeros_like(codes).at[order].set(codes)
    return pack(codes.T, grid.bits), scales.T, None if zeros is None else zeros.T


def _settled(coupling: Array, span: int) -> Array:
    """`(I + C_bb)^-1`, `[blocks, S, S]`, of the S x S blocks on the diagonal.

    Earlier errors shift the columns of a block by `shift`; if none of them were then rounded, each would correct for
    those before it, and the block would come to rest at `shift (I + C_bb)^-1`. That is where a scale should look.
    """
    starts = jnp.arange(0, len(coupling), span)
    within = jax.vmap(lambda start: lax.dynamic_slice(coupling, (start, start), (span, span)))(starts)

    def substitute(i, t):
        return t - t[:, :, i, None] * within[:, i, None, :]

    return lax.fori_loop(0, span, substitute, jnp.broadcast_to(jnp.eye(span), within.shape))


def _round_columns(given: Array, now: Array, coupling: Array, scales: Array, zeros: Array | None, bits: int) -> Array:
    """Codes `[S, N]` of S columns, rounded in turn; `now [S, N]` is `given` with the errors of columns before them.

    coupling: `[S, S]`, among them; scales, zeros: `[S, N]`.
    """

    def column(i, carry):
        now, codes = carry
        scale, zero = scales[i], None if zeros is None else zeros[i]
        code = nearest_codes(now[i], scale, zero, bits)
        error = given[i] - code_values(code, scale, zero)
        return now + coupling[i][:, None] * error, codes.at[i].set(code)

    return lax.fori_loop(0, len(given), column, (now, jnp.zeros(now.shape, jnp.int8)))[1]


@jax.jit
def _energies(w: Array, quantised: QuantTensor, hessian: Array) -> tuple[Array, Array]:
    """Squared output error and squared output `[N]` of each row."""
    w = w.astype(jnp.float32)
    error = w - dequantize(quantised, "float32")
    return tuple(jnp.sum(jnp.matmul(t, hessian, precision=_HIGHEST) * t, axis=1) for t in (error, w))
