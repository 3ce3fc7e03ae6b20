"""The decode step with drafts: propose, verify, accept, commit and observe as one compiled program.

A step reads the anchor and its drafts in one block, keeps what agrees with the model, and emits that and one more
token. What it emits is what plain decoding would: the same tokens at temperature 0, else the same distribution.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from qwen38_jax import decode
from qwen38_jax.block import Block, chain_block
from qwen38_jax.block_length import BlockLength, first_block, next_block, step_reason
from qwen38_jax.config import ModelConfig
from qwen38_jax.decode import DecodeState, StepOutput
from qwen38_jax.drafters.interface import SOURCES, DraftContext, Drafter, Observed, Proposal
from qwen38_jax.drafters.lookup import fuse, resize, suffix_match
from qwen38_jax.model import forward, logits
from qwen38_jax.params import Params
from qwen38_jax.sampling import SamplerState, process_logits, sample, token_logprobs, update_counts
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import State, StateConfig, accept_path
from qwen38_jax.tree import Tree
from qwen38_jax.verification import Verdict, verify, walk_tree

Array = jax.Array


@struct.dataclass
class Counts:
    """What each sequence's steps did, since its start.

    steps, long_steps: `[B]` int32, decode steps and those that had a long block.
    drafted, accepted: `[B, sources, k]` int32, drafts verified and drafts emitted, by who proposed them (`SOURCES`) and
      by their place in the block, a chain's or a tree's.
    """

    steps: Array
    long_steps: Array
    drafted: Array
    accepted: Array


@struct.dataclass
class SpeculativeState:
    """B sequences while they are decoded with drafts.

    decode: what plain decoding carries; `decode.token` is the anchor, at position `decode.model.lengths`.
    history: `[B, capacity]` int32, every token of prompt and output by position, the anchor included.
    limit: `[B]` int32, tokens that may be emitted; a sequence that has emitted them is no longer active.
    distance: `[B]` int32, how far before the text's end the last match of a lookup was.
    drafter: the drafter's own state. block: whether the coming block is long. counts: for reports.
    """

    decode: DecodeState
    history: Array
    limit: Array
    distance: Array
    drafter: Any
    block: BlockLength
    counts: Counts

    def with_active(self, active: Array) -> "SpeculativeState":
        """The same state in which only the sequences of `active [B]` grow."""
        return self.replace(decode=self.decode.with_active(active))


def start(
    cfg: ModelConfig,
    drafter: Drafter,
    spec: SpecConfig,
    sizes: StateConfig,
    model: State,
    sampler: SamplerState,
    active: Array,
    limit: Array,
) -> SpeculativeState:
    """The state of sequences whose prompts are yet to be read.

    Args:
      sizes: that `model` was made with; its `rows` must be at least `spec.verify_tokens + 1`.
      active: `[B]` bool; the other slots stay idle.
      limit: `[B]` int32, tokens that each may emit: a prompt of n tokens and they must fit in the state and in the
        model's context.

    Raises:
      ValueError: the state keeps too few rows pending.
    """
    if sizes.rows < spec.verify_tokens + 1:
        raise ValueError(f"blocks of {spec.verify_tokens + 1} rows need StateConfig.rows of as many, got {sizes.rows}")

    def zeros(*shape):
        return jnp.zeros((sizes.batch, *shape), jnp.int32)

    by_source = (len(SOURCES), spec.verify_tokens)
    return SpeculativeState(
        decode=decode.start(cfg, model, sampler, active),
        history=zeros(model.capacity),
        limit=limit,
        distance=zeros(),
        drafter=drafter.init(cfg, sizes),
        block=first_block(sizes.batch, spec, drafter.draft_tokens),
        counts=Counts(zeros(), zeros(), zeros(*by_source), zeros(*by_source)),
    )


def prefill(
    params: Params, cfg: ModelConfig, drafter: Drafter, tokens: Array, valid: Array, state: SpeculativeState
) -> SpeculativeState:
    """Reads a chunk of prompts, as `decode.prefill`, and lets the drafter observe it."""
    block = chain_block(tokens, state.decode.model.lengths, valid)
    hidden, taps, model = forward(params, cfg, block, state.decode.model, commit=True, tap_layers=drafter.tap_layers)
    rows = Observed(tokens, block.positions, valid, hidden, taps, state.decode.hidden, model.block_table)
    return state.replace(
        decode=decode.after_chunk(state.decode, model, hidden, valid),
        history=_write(state.history, block.positions, tokens, valid),
        drafter=drafter.observe(params, cfg, rows, state.drafter),
    )


def emit(params: Params, state: SpeculativeState, top: int) -> tuple[SpeculativeState, StepOutput]:
    """Samples the first token of every active sequence, as `decode.emit`."""
    decoded, output = decode.emit(params, state.decode, top)
    decoded = decoded.replace(active=decoded.active & (decoded.generated < state.limit))
    history = _write(state.history, decoded.model.lengths[:, None], output.tokens, state.decode.active[:, None])
    return state.replace(decode=decoded, history=history), output.replace(long=state.block.long)


def decode_step(
    params: Params,
    cfg: ModelConfig,
    drafter: Drafter,
    spec: SpecConfig,
    state: SpeculativeState,
    *,
    verify_tokens: int,
    top: int,
) -> tuple[SpeculativeState, StepOutput]:
    """One step with blocks of `verify_tokens + 1` rows; one program for each such length.

    Args:
      verify_tokens: at most `spec.verify_tokens`; drafts beyond it are left out.
      top: how many of the likeliest tokens to report.
    """
    return _step(params, cfg, drafter, spec, state, verify_tokens, top, forced=None)


def forced_step(
    params: Params,
    cfg: ModelConfig,
    drafter: Drafter,
    spec: SpecConfig,
    state: SpeculativeState,
    text: Array,
    *,
    verify_tokens: int,
) -> tuple[SpeculativeState, StepOutput]:
    """A step that accepts what agrees with `text [B, capacity]`, by position, whatever the model would say."""
    return _step(params, cfg, drafter, spec, state, verify_tokens, 0, forced=text)


def _step(params, cfg, drafter, spec, state, verify_tokens, top, forced):
    propose = _propose if spec.tree is None else _propose_tree
    proposal, has_tail, state = propose(params, cfg, drafter, spec, state, verify_tokens)
    old = state.decode
    block = _block(proposal, old, spec.tree)
    hidden, taps, model = forward(params, cfg, block, old.model, commit=False, tap_layers=drafter.tap_layers)
    scores = logits(params, hidden)
    verdict = _judge(scores, proposal, old, forced, spec.tree)

    emitted, stopped = _cut(verdict, old)
    is_emitted = jnp.arange(verdict.tokens.shape[1]) < emitted[:, None]
    # The rows that were read and stay: the anchor and the drafts emitted before the last token.
    path = _path(verdict, is_emitted, block)
    model = accept_path(model, jnp.pad(path, ((0, 0), (0, model.pending.path.shape[1] - path.shape[1]))))
    # From here on a tree is the path in it that stays, a chain like any other.
    block, hidden, scores = (_on_path(verdict, t) for t in (block, hidden, scores))
    taps = jax.vmap(lambda tap: _on_path(verdict, tap))(taps)
    rows = Observed(block.tokens, block.positions, is_emitted, hidden, taps, old.hidden, model.block_table)
    last = jnp.maximum(emitted - 1, 0)[:, None]
    generated = old.generated + emitted
    decoded = old.replace(
        model=model,
        sampler=update_counts(old.sampler, verdict.tokens, is_emitted),
        hidden=jnp.where(old.active[:, None], jnp.take_along_axis(hidden, last[..., None], axis=1)[:, 0], old.hidden),
        token=jnp.where(old.active, jnp.take_along_axis(verdict.tokens, last, axis=1)[:, 0], old.token),
        generated=generated,
        active=old.active & ~stopped & (generated < state.limit),
    )
    reason = step_reason(has_tail, emitted, state.block.long, spec, drafter.draft_tokens)
    positions = old.model.lengths[:, None] + 1 + jnp.arange(verdict.tokens.shape[1])
    state = state.replace(
        decode=decoded,
        history=_write(state.history, positions, verdict.tokens, is_emitted),
        drafter=drafter.observe(params, cfg, rows, state.drafter),
        block=next_block(state.block, reason, model.lengths, spec, drafter.draft_tokens),
        counts=_count(state, proposal, path),
    )
    reported = token_logprobs(scores, verdict.tokens, top, real_vocab_size=old.sampler.real_vocab_size)
    return state, StepOutput(verdict.tokens, emitted, *reported, long=state.block.long)


def _propose(params, cfg, drafter, spec, state, verify_tokens) -> tuple[Proposal, Array, SpeculativeState]:
    """`verify_tokens` drafts; whether a lookup reaches behind the drafter's own; the state after drafting."""
    with jax.named_scope("draft"):
        proposal, drafter_state = drafter.propose(params, cfg, _context(state), state.drafter)
        state = state.replace(drafter=drafter_state)
        has_tail = jnp.zeros_like(state.decode.active)
        if spec.lookup:
            sizes = {"nmin": spec.nmin, "nmax": spec.nmax, "search": spec.search}
            position = state.decode.model.lengths
            match = suffix_match(state.history, position, state.distance, spec.verify_tokens, **sizes)
            proposal, has_tail = fuse(proposal, match, spec)
            state = state.replace(distance=match.distance)
    proposal = resize(proposal, verify_tokens)
    room = jnp.minimum(jnp.where(state.block.long, spec.verify_tokens, drafter.draft_tokens), _room(state))
    valid = proposal.valid & (jnp.arange(verify_tokens) < room[:, None])
    return proposal.replace(valid=jnp.cumprod(valid, axis=1).astype(bool)), has_tail, state


def _propose_tree(params, cfg, drafter, spec, state, verify_tokens) -> tuple[Proposal, Array, SpeculativeState]:
    """As `_propose`, the drafts of `spec.tree`."""
    with jax.named_scope("draft"):
        proposal, drafter_state = drafter.propose_tree(params, cfg, _context(state), state.drafter, spec.tree)
    valid = proposal.valid & (spec.tree.depths[1:] <= _room(state)[:, None])
    valid = jnp.all(valid[:, None, :] | ~spec.tree.ancestors[1:, 1:], axis=2)
    return proposal.replace(valid=valid), jnp.zeros_like(state.decode.active), state.replace(drafter=drafter_state)


def _context(state: SpeculativeState) -> DraftContext:
    old = state.decode
    return DraftContext(
        anchor=old.token,
        position=old.model.lengths,
        hidden=old.hidden,
        history=state.history,
        active=old.active,
        sampler=old.sampler,
        block_table=old.model.block_table,
    )


def _room(state: SpeculativeState) -> Array:
    """How many drafts one behind the other there is room for, `[B]`; none in an idle slot.

    The last token that may be emitted needs no draft: it comes out of the row before it.
    """
    return jnp.where(state.decode.active, state.limit - state.decode.generated - 1, 0)


def _block(proposal: Proposal, old: DecodeState, tree: Tree | None) -> Block:
    """The anchor and the drafts, as the model reads them."""
    tokens = jnp.concatenate([old.token[:, None], proposal.tokens], axis=1)
    valid = jnp.concatenate([old.active[:, None], proposal.valid], axis=1)
    tokens = jnp.where(valid, tokens, 0)
    if tree is None:
        return chain_block(tokens, old.model.lengths, valid)
    positions = jnp.where(valid, old.model.lengths[:, None] + tree.depths, 0)
    return Block(tokens, positions, valid, jnp.broadcast_to(tree.parents, tokens.shape))


def _path(verdict: Verdict, is_emitted: Array, block: Block) -> Array:
    """`[B, rows]` bool, the rows of the block that stay: as many as `is_emitted [B, depths]` says."""
    if verdict.rows is None:
        return is_emitted
    rows = jnp.arange(block.tokens.shape[1])
    return jnp.any(is_emitted[..., None] & (verdict.rows[..., None] == rows), axis=1)


def _on_path(verdict: Verdict, tree: Any) -> Any:
    """Of arrays `[B, rows, ...]` the rows of the path that stays; all of a chain."""
    if verdict.rows is None:
        return tree
    sequence = jnp.arange(len(verdict.rows))[:, None]
    return jax.tree.map(lambda t: t[sequence, verdict.rows], tree)


def _judge(scores: Array, proposal: Proposal, old: DecodeState, forced: Array | None, tree: Tree | None) -> Verdict:
    first = old.model.lengths + 1
    if tree is not None:
        at = first[:, None] + tree.depths
        said = _said(scores, proposal, old, tree, at) if forced is None else _forced_tokens(forced, at)
        return walk_tree(said, proposal.tokens, proposal.valid, tree)
    rows = jnp.arange(scores.shape[1])
    if forced is not None:
        tokens = _forced_tokens(forced, first[:, None] + rows)
        stays = proposal.valid & (proposal.tokens == tokens[:, :-1])
        return Verdict(tokens, jnp.sum(jnp.cumprod(stays, axis=1), axis=1, dtype=jnp.int32))
    # Row l follows the drafts before it; the id V is dropped.
    follows = rows[:, None] > rows[:-1]
    drafted = jnp.where(follows & proposal.valid[:, None, :], proposal.tokens[:, None, :], scores.shape[-1])
    log_p = process_logits(scores, old.sampler, old.generated[:, None] + rows, drafted)
    return verify(log_p, proposal, old.sampler, first)


def _said(scores: Array, proposal: Proposal, old: DecodeState, tree: Tree, at: Array) -> Array:
    """`[B, rows]` int32: the token drawn after each row of a tree, with the noise of its position `at [B, rows]`."""
    on_way = tree.ancestors[:, 1:] & proposal.valid[:, None, :]
    drafted = jnp.where(on_way, proposal.tokens[:, None, :], scores.shape[-1])
    log_p = process_logits(scores, old.sampler, old.generated[:, None] + tree.depths, drafted)
    return sample(log_p, old.sampler, at)


def _forced_tokens(text: Array, at: Array) -> Array:
    return jnp.take_along_axis(text, jnp.minimum(at, text.shape[1] - 1), axis=1)


def _cut(verdict: Verdict, old: DecodeState) -> tuple[Array, Array]:
    """How many tokens are emitted, `[B]`: up to a stop id, which is the last; and whether there was one."""
    tokens = verdict.tokens
    is_stop = jnp.any(tokens[..., None] == old.sampler.stop_ids[:, None, :], axis=-1)
    is_stop &= jnp.arange(tokens.shape[1]) <= verdict.accepted[:, None]
    stopped = jnp.any(is_stop, axis=1)
    emitted = jnp.where(stopped, jnp.argmax(is_stop, axis=1), verdict.accepted) + 1
    return jnp.where(old.active, emitted, 0).astype(jnp.int32), stopped & old.active


def _count(state: SpeculativeState, proposal: Proposal, path: Array) -> Counts:
    counts, active = state.counts, state.decode.active
    drafted = proposal.valid[:, None, :] & (proposal.source[:, None, :] == jnp.arange(len(SOURCES))[:, None])
    # The last token emitted counts as the model's own, even where it is a draft, a stop id: 1 + accepted each step.
    accepted = drafted & path[:, None, 1:]
    width = proposal.tokens.shape[1]
    return counts.replace(
        steps=counts.steps + active,
        long_steps=counts.long_steps + (active & state.block.long),
        drafted=counts.drafted.at[..., :width].add(drafted),
        accepted=counts.accepted.at[..., :width].add(accepted),
    )


def _write(history: Array, positions: Array, tokens: Array, valid: Array) -> Array:
    """`history [B, N]` with the valid `tokens [B, L]` at their `positions [B, L]`."""
    at = jnp.where(valid, positions, history.shape[1])
    return history.at[jnp.arange(len(history))[:, None], at].set(tokens, mode="drop")
