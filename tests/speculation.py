"""Drafters that say what a test wants, and a host loop around the compiled step, for tests of speculation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen38_jax import decode, speculative
from qwen38_jax.drafters.interface import MTP, DraftContext, Proposal
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import StateConfig, init_state
from tests.models import poisoned_state

GREEDY = SamplingParams(temperature=0, seed=0)


@struct.dataclass
class Scripted:
    """Drafts the tokens of `text [B, capacity]`, but others where `wrong [K]` says so. Its state counts rows seen."""

    text: jax.Array
    wrong: jax.Array
    draft_tokens: int = struct.field(pytree_node=False)
    tap_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def init(self, cfg, sizes):
        return jnp.zeros(sizes.batch, jnp.int32)

    def propose(self, params, cfg, context: DraftContext, state):
        at = context.position[:, None] + 1 + jnp.arange(self.draft_tokens)
        tokens = jnp.take_along_axis(self.text, jnp.minimum(at, self.text.shape[1] - 1), axis=1)
        tokens = jnp.where(self.wrong[: self.draft_tokens], (tokens + 1) % cfg.vocab_size, tokens)
        sure = jnp.ones(tokens.shape, bool)
        empty = jnp.zeros((*tokens.shape, 0))
        return Proposal(tokens, empty.astype(jnp.int32), empty, sure, sure, jnp.full_like(tokens, MTP)), state

    def observe(self, params, cfg, rows, state):
        return state + jnp.sum(rows.valid, axis=1)


def script(sequences, capacity, drafts, wrong=()) -> Scripted:
    """A drafter of `drafts` tokens that knows whole `sequences` of ids, and errs at the `wrong` places of a block."""
    text = np.zeros((len(sequences), capacity), np.int32)
    for row, sequence in enumerate(sequences):
        text[row, : len(sequence)] = sequence[:capacity]
    return Scripted(jnp.asarray(text), jnp.isin(jnp.arange(32), jnp.asarray(wrong, jnp.int32)), drafts)


_prefill = jax.jit(speculative.prefill, static_argnames="cfg")
_emit = jax.jit(speculative.emit, static_argnames="top")
step = jax.jit(speculative.decode_step, static_argnames=("cfg", "spec", "verify_tokens", "top"))


def sampler_of(cfg, requests, prompts, eos_ids=()):
    return sampler_state(requests, prompts, vocab_size=cfg.vocab_size, real_vocab_size=cfg.vocab_size, eos_ids=eos_ids)


def begin(params, cfg, drafter, spec, prompts, requests=None, *, rows=32, capacity=128, chunk=16, limit=None, eos=()):
    """A state after the prompts (of any lengths) and the first token, and that step's output; free space is NaN."""
    requests = requests or [GREEDY] * len(prompts)
    sizes = StateConfig(len(prompts), capacity, rows=rows, page=16)
    limit = jnp.asarray([r.max_new_tokens if limit is None else limit for r in requests], jnp.int32)
    state = speculative.start(
        cfg,
        drafter,
        spec,
        sizes,
        poisoned_state(cfg, sizes),
        sampler_of(cfg, requests, prompts, eos),
        jnp.ones(len(prompts), bool),
        limit,
    )
    for at in range(0, max(map(len, prompts)), chunk):
        tokens, valid = np.zeros((len(prompts), chunk), np.int32), np.zeros((len(prompts), chunk), bool)
        for row, ids in enumerate(prompts):
            piece = ids[at : at + chunk]
            tokens[row, : len(piece)], valid[row, : len(piece)] = piece, True
        state = _prefill(params, cfg, drafter, tokens, valid, state)
    return _emit(params, state, top=0)


def generate(params, cfg, drafter, spec, prompts, requests=None, *, verify=None, steps=1000, **options):
    """Token ids of each sequence until all have ended, and the last state.

    verify: blocks of this many drafts and no others; None lets the state choose.
    """
    state, output = begin(params, cfg, drafter, spec, prompts, requests, **options)
    texts = [[] for _ in prompts]
    for _ in range(steps):
        for row, text in enumerate(texts):
            text += np.asarray(output.tokens[row, : int(output.emitted[row])]).tolist()
        if not state.decode.active.any():
            break
        long = bool((output.long & state.decode.active).any())
        chosen = spec.verify_tokens if long else min(drafter.draft_tokens, spec.verify_tokens)
        state, output = step(
            params, cfg, drafter, spec, state, verify_tokens=chosen if verify is None else verify, top=0
        )
    return texts, state


@functools.partial(jax.jit, static_argnames="cfg")
def _plain_step(params, cfg, state):
    return decode.decode_step(params, cfg, state, 0)


def plain(params, cfg, prompts, n, requests=None, capacity=128, chunk=16):
    """`n` tokens of each sequence by plain decoding; stop ids and limits are not heeded."""
    requests = requests or [GREEDY] * len(prompts)
    texts = []
    for ids, request in zip(prompts, requests, strict=True):
        sizes = StateConfig(1, capacity, page=16)
        state = decode.start(cfg, init_state(cfg, sizes), sampler_of(cfg, [request], [ids]), jnp.ones(1, bool))
        for at in range(0, len(ids), chunk):
            piece = ids[at : at + chunk]
            tokens = np.zeros((1, chunk), np.int32)
            tokens[0, : len(piece)] = piece
            state = _plain_prefill(params, cfg, tokens, np.arange(chunk)[None] < len(piece), state)
        state, output = _plain_emit(params, state)
        text = [int(output.tokens[0, 0])]
        for _ in range(n - 1):
            state, output = _plain_step(params, cfg, state.replace(active=jnp.ones(1, bool)))
            text.append(int(output.tokens[0, 0]))
        texts.append(text)
    return texts


_plain_prefill = jax.jit(decode.prefill, static_argnames="cfg")
_plain_emit = jax.jit(lambda params, state: decode.emit(params, state, 0))

__all__ = ["GREEDY", "Scripted", "SpecConfig", "begin", "generate", "plain", "sampler_of", "script", "step"]
