"""Gated DeltaNet: a linear-attention layer whose state is a decaying key-value matrix that writes corrections.

Notation of the paper (Yang et al., "Gated Delta Networks", 2024), one value head, row t of a block:

    S_t = exp(g_t) S_{t-1} + k_t d_t^T,     d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t),     o_t = S_t^T q_t

Inside a block, with G_t the sum of g over the rows up to t and D[t, i] = exp(G_t - G_i):

    (I + A) d = beta (v - exp(G) S_0^T k),   A[t, i] = beta_t D[t, i] (k_i . k_t)   for i < t
    o = exp(G) S_0^T q + (D (q k^T)) d                                              for i <= t
    S_n = exp(G_n) S_0 + sum_i exp(G_n - G_i) k_i d_i^T                             over the n rows kept

d_i never looks ahead, so any number of leading rows can be kept after the fact; and nothing asks the rows to be a
chain: over a tree, "up to t" reads "on the path to t". Everything here is fp32 whatever the model's dtype.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._delta_rule import takes_heads
from qwen38_jax.block import Block, visible
from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.kernels import takes_kernels
from qwen38_jax.layers.linear import PRECISION, linear
from qwen38_jax.layers.norm import gated_rms_norm, l2_norm
from qwen38_jax.params import GatedDeltaNet

Array = jax.Array

CHUNK = 64  # rows solved at once; longer blocks are cut into chunks of this many


class Writes(NamedTuple):
    """What the rows of a block would write into the state, kept until it is known which rows stay.

    key: `[B, L, key_heads, Dk]`; delta: `[B, L, value_heads, Dv]`; log_decay: `[B, L, value_heads]`, G above, all
    fp32; columns: `[B, L, channels]`, inputs of the short convolution in the model's dtype.
    """

    key: Array
    delta: Array
    log_decay: Array
    columns: Array


class Inputs(NamedTuple):
    """Inputs of the recurrence. q, k `[B, L, key_heads, Dk]`, v `[B, L, value_heads, Dv]`, g, beta fp32 `[B, L,
    value_heads]`. q, k and v are as the convolution leaves them; or, after `normalise`, fp32, and of a row that is not
    valid all is zero, which changes neither the state nor any other row."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


# The recurrence over rows that are not normalised: outputs; keys, deltas and G as in `Writes`, or None each where the
# rows are written already; and what becomes of the state.
Rule = Callable[[Inputs], tuple[Array, Array | None, Array | None, Array | None, Any]]


def uses_kernels(cfg: ModelConfig) -> bool:
    """Whether the recurrence is computed by kernels: for heads that they take."""
    return takes_kernels(cfg.kernels, cfg.dtype) and takes_heads(cfg.linear_key_head_dim, cfg.linear_value_head_dim)


def gated_delta_net(
    layer: GatedDeltaNet, cfg: ModelConfig, x: Array, block: Block, rule: Rule, window: Array
) -> tuple[Array, Writes, Any, Array]:
    """One layer over a block.

    Args:
      x: `[B, L, hidden]`.
      rule: the recurrence, from the state before the block, which it knows.
      window: `[B, width - 1, channels]`, the convolution's last inputs before the block.

    Returns:
      The output `[B, L, hidden]`; the block's `Writes`; what `rule` says of the state; the window as it is if every
      valid row is kept (for a chain; after a tree it means nothing).
    """
    batch, n, _ = x.shape
    columns, z = jnp.split(linear(x, layer.qkvz), [cfg.conv_channels], axis=-1)
    with jax.named_scope("short_conv"):
        mixed, next_window = short_conv(layer.conv, columns, window, block)
    with jax.named_scope("delta_rule"):
        out, key, delta, log_decay, state = rule(make_inputs(layer, cfg, x, mixed))
    z = z.reshape(batch, n, cfg.linear_num_value_heads, cfg.linear_value_head_dim)
    y = gated_rms_norm(out.astype(x.dtype), z, layer.norm, cfg.rms_norm_eps)
    y = linear(y.reshape(batch, n, -1), layer.out)
    return y, Writes(key, delta, log_decay, columns), state, next_window


def make_inputs(layer: GatedDeltaNet, cfg: ModelConfig, x: Array, mixed: Array) -> Inputs:
    """The recurrence's inputs, not normalised, from `x [B, L, hidden]` and the convolved `mixed [B, L, channels]`."""
    batch, n, _ = x.shape
    keys = cfg.linear_num_key_heads * cfg.linear_key_head_dim
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (t.reshape(batch, n, -1, cfg.linear_key_head_dim) for t in (q, k))
    v = v.reshape(batch, n, -1, cfg.linear_value_head_dim)
    b, a = jnp.split(linear(x, layer.ba, jnp.float32), 2, axis=-1)
    g = -jnp.exp(layer.A_log.astype(jnp.float32)) * jax.nn.softplus(a + layer.dt_bias.astype(jnp.float32))
    return Inputs(q, k, v, g, jax.nn.sigmoid(b))


def normalise(inputs: Inputs, valid: Array) -> Inputs:
    """In fp32, with keys and queries of length 1 and 1 / sqrt(Dk), and zero where not `valid [B, L]`."""
    q, k, v, g, beta = inputs
    inputs = Inputs(l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k), v.astype(jnp.float32), g, beta)
    # Masked after the activations: a padded row still has g < 0 for a = 0.
    return Inputs(*(jnp.where(valid.reshape(*valid.shape, *[1] * (t.ndim - 2)), t, 0.0) for t in inputs))


def whole_rule(inputs: Inputs, state: Array, block: Block) -> tuple[Array, Array, Array, Array, Array]:
    """A `Rule` in plain jnp, from `state [B, value_heads, Dk, Dv]` to the state after all rows of a chain."""
    inputs = normalise(inputs, block.valid)
    out, delta, log_decay, state = delta_rule(inputs, state, block)
    return out, inputs.k, delta, log_decay, state


def short_conv(weight: Array, columns: Array, window: Array, block: Block) -> tuple[Array, Array]:
    """Causal depthwise convolution and silu.

    Args:
      weight: `[channels, width]`; the last column multiplies the current row.
      columns: `[B, L, channels]`; window: `[B, width - 1, channels]`, the committed inputs before them.

    Returns:
      `[B, L, channels]` in `columns.dtype`, and the window after all valid rows of a chain.
    """
    width, n = weight.shape[1], columns.shape[1]
    # Laid right in front of the first valid row, over rows that nobody reads, so padding may be on either side.
    first = jnp.argmax(block.valid, axis=1)
    extended = jnp.pad(columns, ((0, 0), (width - 1, 0), (0, 0)))
    extended = jax.vmap(lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(extended, window, first, 0)
    if block.parents is None:
        taps = [extended[:, j : j + n] for j in range(width)]
    else:
        index = _path_index(block, first, width)
        taps = [jnp.take_along_axis(extended, index[:, :, j, None], axis=1) for j in range(width)]
    w = weight.astype(jnp.float32)
    y = sum(tap.astype(jnp.float32) * w[:, j] for j, tap in enumerate(taps))
    end = first + jnp.sum(block.valid, axis=1)
    next_window = jax.vmap(lax.dynamic_slice_in_dim, (0, 0, None, None))(extended, end, width - 1, 0)
    return jax.nn.silu(y).astype(columns.dtype), next_window


def _path_index(block: Block, first: Array, width: int) -> Array:
    """`[B, L, width]`: places of the `width` last inputs on the path to each row, itself last.

    Row i is at place i + width - 1; the window fills the `width - 1` places before row `first [B]`.
    """
    before = width - 1
    batch, n = block.parents.shape
    of_rows = jnp.where(block.parents < 0, first[:, None] + before - 1, block.parents + before)
    # Predecessor of every place. What is no valid row may be the window, whose inputs follow each other.
    of_rows = jnp.where(block.valid, of_rows, jnp.arange(n) + before - 1)
    in_front = jnp.broadcast_to(jnp.maximum(jnp.arange(before) - 1, 0), (batch, before))
    predecessor = jnp.concatenate([in_front, of_rows], axis=1)
    places = [jnp.broadcast_to(jnp.arange(n) + before, (batch, n))]
    for _ in range(before):
        places.append(jnp.take_along_axis(predecessor, places[-1], axis=1))
    return jnp.stack(places[::-1], axis=-1)


def delta_rule(inputs: Inputs, state: Array, block: Block) -> tuple[Array, Array, Array, Array]:
    """The recurrence over a block, in chunks.

    Returns `o [B, L, value_heads, Dv]`, the deltas of the same shape, G `[B, L, value_heads]` (from the start of the
    row's chunk), and the state `[B, value_heads, Dk, Dv]` after every row of a chain.

    Raises:
      ValueError: a tree of more than `CHUNK` rows.
    """
    n = inputs.v.shape[1]
    if n > CHUNK:
        if block.parents is not None:
            raise ValueError(f"a tree may have at most {CHUNK} rows, got {n}")
        return _chunks_at_once(inputs, state)
    terms = _chunk_terms(inputs, visible(block))
    out, delta, state = _apply_chunk(terms, _split_heads(state, inputs.k.shape[2]))
    return _rows(out), _rows(delta), _rows(terms.log_decay), _join_heads(state)


class _ChunkTerms(NamedTuple):
    """All of a chunk that does not depend on the incoming state. `h` is a key head, `r` a value head of it."""

    q: Array  # [B, h, 1, C, Dk]
    k: Array  # [B, h, 1, C, Dk]
    solved_values: Array  # [B, h, r, C, Dv], (I + A)^-1 beta v
    solved_keys: Array  # [B, h, r, C, Dk], (I + A)^-1 beta exp(G) k
    scores: Array  # [B, h, r, C, C], D (q k^T), zero where a row may not look
    log_decay: Array  # [B, h, r, C], G


def _chunk_terms(inputs: Inputs, mask: Array) -> _ChunkTerms:
    """`mask [B, C, C]` says which rows of the chunk lie on the path to each row, itself included."""
    heads = inputs.k.shape[2]
    q, k = (t.swapaxes(1, 2)[:, :, None] for t in (inputs.q, inputs.k))
    v, g, beta = (_by_head(t, heads) for t in (inputs.v, inputs.g, inputs.beta))
    log_decay = jnp.einsum("bij,bhrj->bhri", mask.astype(jnp.float32), g, precision=PRECISION)
    mask = mask[:, None, None]
    # The difference first, masked before exp: under strong decay the other triangle overflows.
    decay = jnp.exp(jnp.where(mask, log_decay[..., :, None] - log_decay[..., None, :], -jnp.inf))
    inverse = unit_lower_inverse(beta[..., None] * decay * _dot_rows(k, k))
    solved_values = _matmul(inverse, beta[..., None] * v)
    solved_keys = _matmul(inverse * (beta * jnp.exp(log_decay))[..., None, :], k)
    return _ChunkTerms(q, k, solved_values, solved_keys, decay * _dot_rows(q, k), log_decay)


@jax.custom_jvp
def unit_lower_inverse(a: Array) -> Array:
    """`(I + A)^-1` for the part A of `a [..., n, n]` below the diagonal.

    Block forward substitution: inverses of diagonal blocks of size s give those of size 2s, since the corner is
    -X22 A21 X11. Stable where the product of the powers of -A, shorter still, is not: with equal keys and no decay
    those reach binomial coefficients of n. Not `lax.linalg.triangular_solve`: on a CPU two of those at once can wait
    for each other's threads for ever (jaxlib 0.10.2, 2 cores).
    """
    n = a.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(n, dtype=a.dtype), a.shape)
    size = 1
    while size < n:
        block, half = np.arange(n) // (2 * size), np.arange(n) // size % 2
        corner = (block[:, None] == block) & (half[:, None] > half)
        step = jnp.where(corner, a, 0.0)
        inverse = inverse - (step if size == 1 else _matmul(_matmul(inverse, step), inverse))
        size *= 2
    return inverse


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """dX = -X dA X: two products, where differentiating the substitution takes twenty and keeps every step of it."""
    inverse = unit_lower_inverse(*primals)
    return inverse, -_matmul(_matmul(inverse, jnp.tril(tangents[0], -1)), inverse)


def _apply_chunk(terms: _ChunkTerms, state: Array) -> tuple[Array, Array, Array]:
    """Outputs, deltas `[B, h, r, C, Dv]` and the next state `[B, h, r, Dk, Dv]` (of a chain)."""
    delta = terms.solved_values - _matmul(terms.solved_keys, state)
    from_state = jnp.exp(terms.log_decay)[..., None] * _matmul(terms.q, state)
    out = from_state + _matmul(terms.scores, delta)
    last = terms.log_decay[..., -1:]
    kept = delta * jnp.exp(last - terms.log_decay)[..., None]
    state = jnp.exp(last)[..., None] * state + _matmul(terms.k.swapaxes(-1, -2), kept)
    return out, delta, state


def _chunks_at_once(inputs: Inputs, state: Array) -> tuple[Array, Array, Array, Array]:
    """A long block: the states between its chunks first, one small product a chunk, then all chunks in parallel.

    With K the keys of a chunk, each times its decay to the chunk's end, and W and U `solved_keys` and `solved_values`:

        S_next = (exp(G_last) I - K^T W) S + K^T U
    """
    batch, n = inputs.v.shape[:2]
    chunks = -(-n // CHUNK)

    def to_chunks(t):  # [B, L, ...] -> [B * chunks, CHUNK, ...]; the zero rows at the end change nothing
        t = jnp.pad(t, ((0, 0), (0, chunks * CHUNK - n), *[(0, 0)] * (t.ndim - 2)))
        return t.reshape(batch * chunks, CHUNK, *t.shape[2:])

    def from_chunks(t):  # [B * chunks, h, r, CHUNK, ...] -> [B, L, heads, ...]
        t = _rows(t)
        return t.reshape(batch, chunks * CHUNK, *t.shape[2:])[:, :n]

    def in_sequence(t):  # [B * chunks, ...] -> [chunks, B, ...]
        return t.reshape(batch, chunks, *t.shape[1:]).swapaxes(0, 1)

    mask = jnp.broadcast_to(jnp.tri(CHUNK, dtype=bool), (batch * chunks, CHUNK, CHUNK))
    terms = _chunk_terms(Inputs(*map(to_chunks, inputs)), mask)
    last = terms.log_decay[..., -1:]
    keys = (terms.k * jnp.exp(last - terms.log_decay)[..., None]).swapaxes(-1, -2)  # [B * chunks, h, r, Dk, C]
    kept = jnp.exp(last)[..., None] * jnp.eye(keys.shape[-2]) - _matmul(keys, terms.solved_keys)
    added = _matmul(keys, terms.solved_values)

    def step(state, chunk):
        kept, added = chunk
        return _matmul(kept, state) + added, state

    state = _split_heads(state, inputs.k.shape[2])
    state, before = lax.scan(step, state, (in_sequence(kept), in_sequence(added)), unroll=4)
    before = before.swapaxes(0, 1).reshape(batch * chunks, *state.shape[1:])
    out, delta, _ = _apply_chunk(terms, before)
    return from_chunks(out), from_chunks(delta), from_chunks(terms.log_decay), _join_heads(state)


def keep_rows(state: Array, writes: Writes, path: Array) -> Array:
    """Writes the rows of a block that `path` keeps into the state before the block.

    Args:
      state: `[B, value_heads, Dk, Dv]` fp32.
      path: `[B, R]` bool, the rows kept: the first n of a chain, or one path of a tree. The others may hold anything.
    """
    leaf = jnp.max(jnp.where(path, jnp.arange(path.shape[1]), -1), axis=1)[:, None, None]  # parents come first
    last = jnp.take_along_axis(writes.log_decay, jnp.maximum(leaf, 0), axis=1)
    last = jnp.where(leaf >= 0, last, 0.0)  # [B, 1, value_heads]
    kept = path[..., None]
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - writes.log_decay, 0.0)), 0.0)
    heads = writes.key.shape[2]
    key = jnp.where(kept[..., None], writes.key, 0.0).swapaxes(1, 2)[:, :, None]
    delta = _by_head(jnp.where(kept[..., None], writes.delta, 0.0) * weight[..., None], heads)
    decayed = jnp.exp(last).swapaxes(1, 2)[..., None] * state
    return decayed + _join_heads(_matmul(key.swapaxes(-1, -2), delta))


def keep_columns(window: Array, columns: Array, path: Array) -> Array:
    """The convolution window `[B, width - 1, channels]` after the rows of `path [B, R]`: its last inputs."""
    before = window.shape[1]
    kept = jnp.pad(path, ((0, 0), (before, 0)), constant_values=True)
    places = jnp.sort(jnp.where(kept, jnp.arange(kept.shape[1]), -1), axis=1)[:, -before:]
    return jnp.take_along_axis(jnp.concatenate([window, columns], axis=1), places[..., None], axis=1)


def recurrent_delta_rule(inputs: Inputs, state: Array) -> tuple[Array, Array]:
    """The recurrence row by row, as the first line of this module writes it: what the chunked form must equal.

    Returns `o [B, L, value_heads, Dv]` and the state after the last row.
    """
    repeats = inputs.v.shape[2] // inputs.k.shape[2]
    q, k = (jnp.repeat(t, repeats, axis=2) for t in (inputs.q, inputs.k))

    def step(state, row):
        q, k, v, g, beta = row
        state = jnp.exp(g)[..., None, None] * state
        read = jnp.einsum("bhkv,bhk->bhv", state, k, precision=PRECISION)
        delta = beta[..., None] * (v - read)
        state = state + k[..., :, None] * delta[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision=PRECISION)

    rows = tuple(t.swapaxes(0, 1) for t in (q, k, inputs.v, inputs.g, inputs.beta))
    state, out = lax.scan(step, state, rows)
    return out.swapaxes(0, 1), state


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=PRECISION)


def _dot_rows(a: Array, b: Array) -> Array:
    """`[..., C, D] x [..., C, D] -> [..., C, C]`, every row of a with every row of b."""
    return jnp.einsum("...id,...jd->...ij", a, b, precision=PRECISION)


def _by_head(t: Array, heads: int) -> Array:
    """`[B, L, heads * r, ...] -> [B, heads, r, L, ...]`; value head i belongs to key head i // r."""
    batch, n = t.shape[:2]
    return jnp.moveaxis(t.reshape(batch, n, heads, -1, *t.shape[3:]), 1, 3)


def _rows(t: Array) -> Array:
    """`[B, h, r, L, ...] -> [B, L, h * r, ...]`."""
    batch, h, r, n = t.shape[:4]
    return jnp.moveaxis(t, 3, 1).reshape(batch, n, h * r, *t.shape[4:])


def _split_heads(state: Array, heads: int) -> Array:
    return state.reshape(state.shape[0], heads, -1, *state.shape[2:])


def _join_heads(state: Array) -> Array:
    return state.reshape(state.shape[0], -1, *state.shape[3:])
