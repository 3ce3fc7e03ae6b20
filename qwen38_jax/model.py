"""The forward pass: one function for a prefill chunk, a decode row and a block of drafts to verify."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gated_delta_net import MAX_ROWS, Pending, Rows, verify_gated_delta_net
from pallas_kernels.gated_delta_net_prefill import prefill_gated_delta_net
from qwen38_jax.block import Block, visible
from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.attention import Context, attend, output, project
from qwen38_jax.layers.gated_delta_net import CHUNK, gated_delta_net, normalise, uses_kernels, whole_rule
from qwen38_jax.layers.linear import embed, linear
from qwen38_jax.layers.mlp import mlp
from qwen38_jax.layers.norm import rms_norm
from qwen38_jax.layers.rope import rope_table
from qwen38_jax.params import Params, layer_at
from qwen38_jax.state import (
    State,
    check_block,
    nothing_pending,
    settled_full,
    settled_recurrent,
    settled_window,
    write_rows,
)

Array = jax.Array

SHORT_ROWS = 32  # that are committed through the kernel of verify blocks; more are a prompt


def forward(
    params: Params,
    cfg: ModelConfig,
    block: Block,
    state: State,
    *,
    commit: bool,
    tap_layers: tuple[int, ...] = (),
) -> tuple[Array, Array, State]:
    """Runs a block of rows on top of `state`.

    Args:
      block: `[B, L]` rows. Ids are checked only when the call is not traced (`state.check_block`).
      commit: True appends every valid row to the state (prefill, plain decoding). False leaves the rows pending for
        `state.accept`; rows of the previous block that were not accepted are gone.
      tap_layers: layers whose output (the residual stream) is wanted too.

    Returns:
      The hidden rows `[B, L, H]` after the final norm; the taps `[len(tap_layers), B, L, H]`; the next state.

    Raises:
      ValueError: a tree with `commit`, a block of more rows than the state keeps pending, a tap that is no layer.
    """
    _check(cfg, block, state, commit, tap_layers)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((block, state))):
        check_block(cfg, block, state)
    x = embed(params.embed, block.tokens)
    taps = jnp.zeros((len(tap_layers), *x.shape), x.dtype)
    tap_slots = np.full(cfg.num_hidden_layers, len(tap_layers), np.int32)
    tap_slots[list(tap_layers)] = np.arange(len(tap_layers))
    tap_slots = jnp.asarray(tap_slots)
    rope, mask = rope_table(block.positions, cfg), visible(block)

    def tap(taps, layer, x):
        return taps.at[tap_slots[layer]].set(x, mode="drop") if tap_layers else taps

    def group(g, carry):
        def linear_layer(j, carry):
            x, taps, state = carry
            x, state = _linear_layer(params, cfg, g * cfg.linear_per_group + j, x, block, mask, state, commit)
            return x, tap(taps, g * (cfg.linear_per_group + 1) + j, x), state

        x, taps, state = lax.fori_loop(0, cfg.linear_per_group, linear_layer, carry)
        x, state = _full_layer(params, cfg, g, x, block, rope, mask, state, commit)
        return x, tap(taps, (g + 1) * (cfg.linear_per_group + 1) - 1, x), state

    x, taps, state = lax.fori_loop(0, cfg.num_groups, group, (x, taps, state))
    return rms_norm(x, params.norm, cfg.rms_norm_eps), taps, _advance(state, block, commit)


def logits(params: Params, hidden: Array) -> Array:
    """Scores `[..., V]` in fp32 of the rows `hidden [..., H]` that `forward` returned."""
    head = params.embed if params.lm_head is None else params.lm_head
    with jax.named_scope("lm_head"):
        return linear(hidden, head, jnp.float32)


def _check(cfg: ModelConfig, block: Block, state: State, commit: bool, tap_layers: tuple[int, ...]) -> None:
    if len(set(tap_layers)) < len(tap_layers) or not all(0 <= i < cfg.num_hidden_layers for i in tap_layers):
        raise ValueError(f"tap_layers must be different layers in [0, {cfg.num_hidden_layers - 1}], got {tap_layers}")
    if commit and block.parents is not None:
        raise ValueError("a tree of drafts cannot be committed as it is; verify it, then accept a path")
    n = block.tokens.shape[1]
    room = 0 if state.pending is None else state.pending.path.shape[1]
    if not commit and n > min(room, CHUNK):
        raise ValueError(
            f"a verify block of {n} rows does not fit: the state keeps {room} rows pending (StateConfig.rows), "
            f"and at most {CHUNK} are solved at once"
        )


def _linear_layer(params, cfg, i, x, block, mask, state, commit):
    """Gated DeltaNet layer `i` of its kind, and its MLP: `x [B, L, H]` and the state after it."""
    layer = layer_at(params.linear, i)
    window = settled_window(state, i)
    with jax.named_scope("gated_delta_net"):
        h = rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
        rule = functools.partial(_rule(cfg, block, state, commit), cfg, i, block, mask, state, commit)
        y, writes, recurrent, next_window = gated_delta_net(layer.mixer, cfg, h, block, rule, window)
    if commit:
        window = next_window
    else:
        state = _put_pending(state, writes=jax.tree.map(_at(i), state.pending.writes, writes))
    state = state.replace(recurrent=recurrent, conv=state.conv.at[i].set(window))
    return add_mlp(layer, cfg, x + y), state


def _rule(cfg, block, state, commit):
    """How the recurrence over a block is computed."""
    if not uses_kernels(cfg):
        return _jnp_rule
    rows = block.tokens.shape[1]
    if commit and rows > SHORT_ROWS:
        return _prefill_rule
    waiting = 0 if state.pending is None else state.pending.path.shape[1]
    return _short_rule if max(rows, waiting) <= MAX_ROWS else _jnp_rule


def _jnp_rule(cfg, i, block, mask, state, commit, inputs):
    """The recurrence of layer `i`, and the states of all layers after it."""
    before = settled_recurrent(state, i)
    *results, after = whole_rule(inputs, before, block)
    return *results, _put_recurrent(state, i, after if commit else before)


def _short_rule(cfg, i, block, mask, state, commit, inputs):
    """The same through a kernel, which changes the states where they are."""
    inputs, pending, path = normalise(inputs, block.valid), None, None
    if state.pending is not None:
        writes, path = state.pending.writes, state.pending.path
        pending = Pending(writes.key, writes.delta, writes.log_decay)
    interpret = cfg.kernels == "interpret"
    out, *writes, states = verify_gated_delta_net(
        Rows(*inputs), mask, state.recurrent, i, pending, path, commit=commit, interpret=interpret
    )
    return out, inputs.k, *writes, states


def _prefill_rule(cfg, i, block, mask, state, commit, inputs):
    """The same for many rows that are committed."""
    before, interpret = settled_recurrent(state, i), cfg.kernels == "interpret"
    out, after = prefill_gated_delta_net(*inputs, block.valid, before, interpret=interpret)
    return out, None, None, None, _put_recurrent(state, i, after)


def _put_recurrent(state, i, recurrent):
    return state.recurrent.at[i].set(recurrent.astype(state.recurrent.dtype))


def _full_layer(params, cfg, g, x, block, rope, mask, state, commit):
    """Attention layer of group `g`, and its MLP: `x [B, L, H]` and the state after it."""
    layer = layer_at(params.full, g)
    with jax.named_scope("attention"):
        kv = settled_full(state, g)
        rows = project(layer.mixer, cfg, rms_norm(x, layer.input_norm, cfg.rms_norm_eps), rope, cfg.kernels)
        if commit:
            kv = write_rows(kv, g, state.block_table, rows.k, rows.v, block.positions, block.valid)
            written = jnp.where(block.valid, block.positions, -1)
        else:
            state = _put_pending(state, k=_at(g)(state.pending.k, rows.k), v=_at(g)(state.pending.v, rows.v))
            written = None
        # Read after the last write, or the whole pool is copied; the new rows lie beyond the lengths.
        context = Context(kv.k, kv.v, g, state.block_table, state.lengths, written)
        x = x + output(layer.mixer, rows, attend(rows, mask, context, cfg.kernels))
    return add_mlp(layer, cfg, x), state.replace(kv=kv)


def add_mlp(layer, cfg: ModelConfig, x: Array) -> Array:
    """The second half of every decoder layer: `x [B, L, H]` plus the MLP of its norm."""
    with jax.named_scope("mlp"):
        return x + mlp(layer.mlp, rms_norm(x, layer.post_norm, cfg.rms_norm_eps))


def _at(i):
    """Writes rows `[B, L, ...]` into the first L of `[layers, B, R, ...]` at layer i."""
    return lambda buffer, rows: buffer.at[i, :, : rows.shape[1]].set(rows.astype(buffer.dtype))


def _put_pending(state: State, **fields) -> State:
    return state.replace(pending=state.pending.replace(**fields))


def _advance(state: State, block: Block, commit: bool) -> State:
    """Bookkeeping after the last layer: what was pending has been applied."""
    if state.pending is not None:
        state = state.replace(pending=nothing_pending(state.pending))
    if commit:
        return state.replace(lengths=state.lengths + jnp.sum(block.valid, axis=1, dtype=jnp.int32))
    n = block.tokens.shape[1]
    pending = state.pending
    return _put_pending(
        state,
        positions=pending.positions.at[:, :n].set(block.positions),
        valid=pending.valid.at[:, :n].set(block.valid),
    )
