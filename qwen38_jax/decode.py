"""Prefill and plain decoding as compiled programs: the sequence grows by one sampled token a step."""

import jax
import jax.numpy as jnp
from flax import struct

from qwen38_jax.block import chain_block
from qwen38_jax.config import ModelConfig
from qwen38_jax.model import forward, logits
from qwen38_jax.params import Params
from qwen38_jax.sampling import SamplerState, process_logits, sample, token_logprobs, update_counts
from qwen38_jax.state import State

Array = jax.Array


@struct.dataclass
class DecodeState:
    """B sequences while they are decoded.

    hidden: `[B, H]`, the model's row (after the final norm) at the last position of each sequence.
    token: `[B]` int32, the token sampled from it, which the model has not read yet.
    generated: `[B]` int32 tokens emitted. active: `[B]` bool, sequences that still grow.
    """

    model: State
    sampler: SamplerState
    hidden: Array
    token: Array
    generated: Array
    active: Array

    def with_active(self, active: Array) -> "DecodeState":
        """The same state in which only the sequences of `active [B]` grow."""
        return self.replace(active=active)


@struct.dataclass
class StepOutput:
    """What a step emitted: up to L tokens a sequence, one in plain decoding.

    tokens: `[B, L]` int32, the first `emitted [B]` of each row; the others mean nothing.
    logprobs: `[B, L]` fp32, the model's own log-probability of each; top_ids, top_logprobs: `[B, L, n]`, the likeliest.
    long: `[B]` bool where drafts are verified: whether the next block is to be long. A program of fewer rows than that
      serves too, but then what is sampled depends on it.
    """

    tokens: Array
    emitted: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array
    long: Array | None = None


def start(cfg: ModelConfig, model: State, sampler: SamplerState, active: Array) -> DecodeState:
    """The state of sequences whose prompts are yet to be read. Slots that are not `active [B]` stay idle."""
    batch = active.shape[0]
    return DecodeState(
        model=model,
        sampler=sampler,
        hidden=jnp.zeros((batch, cfg.hidden_size), jnp.dtype(cfg.dtype)),
        token=jnp.zeros(batch, jnp.int32),
        generated=jnp.zeros(batch, jnp.int32),
        active=active,
    )


def prefill(params: Params, cfg: ModelConfig, tokens: Array, valid: Array, state: DecodeState) -> DecodeState:
    """Reads a chunk of prompts, `tokens [B, L]` where `valid [B, L]`; rows on either side may be padding."""
    hidden, _, model = forward(params, cfg, chain_block(tokens, state.model.lengths, valid), state.model, commit=True)
    return after_chunk(state, model, hidden, valid)


def after_chunk(state: DecodeState, model: State, hidden: Array, valid: Array) -> DecodeState:
    """The state after `forward` gave `hidden [B, L, H]` for the `valid [B, L]` rows of a chunk, and `model`."""
    last = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1]), -1), axis=1)
    row = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    return state.replace(model=model, hidden=jnp.where(last[:, None] >= 0, row, state.hidden))


def emit(params: Params, state: DecodeState, top: int) -> tuple[DecodeState, StepOutput]:
    """Samples the next token of every active sequence, and ends those that drew one of their stop ids.

    top: how many of the likeliest tokens to report.
    """
    scores = logits(params, state.hidden)
    log_probs = process_logits(scores, state.sampler, state.generated)
    token = sample(log_probs, state.sampler, state.model.lengths)
    reported = token_logprobs(scores, token, top, real_vocab_size=state.sampler.real_vocab_size)
    stopped = jnp.any(token[:, None] == state.sampler.stop_ids, axis=1)
    output = StepOutput(token[:, None], state.active.astype(jnp.int32), *(t[:, None] for t in reported))
    state = state.replace(
        sampler=update_counts(state.sampler, token, state.active),
        token=token,
        generated=state.generated + state.active,
        active=state.active & ~stopped,
    )
    return state, output


def decode_step(params: Params, cfg: ModelConfig, state: DecodeState, top: int) -> tuple[DecodeState, StepOutput]:
    """Reads the last token of every active sequence and samples the one after it."""
    block = chain_block(state.token[:, None], state.model.lengths, state.active[:, None])
    hidden, _, model = forward(params, cfg, block, state.model, commit=True)
    hidden = jnp.where(state.active[:, None], hidden[:, 0], state.hidden)
    return emit(params, state.replace(model=model, hidden=hidden), top)
