"""Drafters that say what a test wants, and a host loop around the compiled step, for tests of speculation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen38_jax import decode, speculative
from qwen38_jax.block_length import always_long
from qwen38_jax.drafters.interface import MTP, DraftContext, Proposal
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import StateConfig, init_state
from tests.models import SMALL, poisoned_state, small_params

GREEDY = SamplingParams(temperature=0, seed=0)


CAPACITY, CHUNK, DRAFTS = 256, 16, 31


@struct.dataclass
class Scripted:
    """Drafts the first `count` tokens that follow in `text [B, CAPACITY]`, but others where `wrong [DRAFTS]` says so.

    One program serves all scripts. What it observes goes into a cache of the MTP head.
    """

    text: jax.Array
    wrong: jax.Array
    count: jax.Array

    name = "mtp"
    draft_tokens = DRAFTS
    tap_layers = ()

    def init(self, cfg, sizes):
        cache = Mtp(None, 1).init(cfg, sizes)
        return jax.tree.map(lambda pool: jnp.full(pool.shape, jnp.nan, pool.dtype), cache)

    def propose(self, params, cfg, context: DraftContext, state):
        at = context.position[:, None] + 1 + jnp.arange(DRAFTS)
        tokens = jnp.take_along_axis(self.text, jnp.minimum(at, CAPACITY - 1), axis=1)
        tokens = jnp.where(self.wrong, (tokens + 1) % cfg.vocab_size, tokens)
        valid = jnp.broadcast_to(jnp.arange(DRAFTS) < self.count, tokens.shape)
        empty = jnp.zeros((*tokens.shape, 0))
        sure = jnp.ones(tokens.shape, bool)
        return Proposal(tokens, empty.astype(jnp.int32), empty, sure, valid, jnp.full_like(tokens, MTP)), state

    def observe(self, params, cfg, rows, state):
        return Mtp(None, 1).observe(params, cfg, rows, state)


def script(sequences, count=DRAFTS, wrong=()) -> Scripted:
    """A drafter of `count` tokens that knows whole `sequences` of ids, and errs at the `wrong` places of a block."""
    text = np.zeros((len(sequences), CAPACITY), np.int32)
    for row, sequence in enumerate(sequences):
        text[row, : len(sequence)] = sequence[:CAPACITY]
    return Scripted(jnp.asarray(text), jnp.isin(jnp.arange(DRAFTS), jnp.asarray(wrong, jnp.int32)), jnp.asarray(count))


_prefill = jax.jit(speculative.prefill, static_argnames="cfg")
_emit = jax.jit(speculative.emit, static_argnames="top")
step = jax.jit(speculative.decode_step, static_argnames=("cfg", "spec", "verify_tokens", "top"))


def sampler_of(cfg, requests, prompts, eos_ids=()):
    return sampler_state(requests, prompts, vocab_size=cfg.vocab_size, real_vocab_size=cfg.vocab_size, eos_ids=eos_ids)


def begin(params, cfg, drafter, spec, prompts, requests=None):
    """A state after the prompts (of any lengths) and the first token, and that step's output; free space is NaN."""
    requests = requests or [GREEDY] * len(prompts)
    sizes = StateConfig(len(prompts), CAPACITY, rows=DRAFTS + 1, page=16)
    limit = jnp.array([min(r.max_new_tokens, CAPACITY - len(p)) for r, p in zip(requests, prompts, strict=True)])
    state = speculative.start(
        cfg,
        drafter,
        spec,
        sizes,
        poisoned_state(cfg, sizes),
        sampler_of(cfg, requests, prompts),
        jnp.ones(len(prompts), bool),
        limit.astype(jnp.int32),
    )
    for tokens, valid in chunks(prompts):
        state = _prefill(params, cfg, drafter, tokens, valid, state)
    return _emit(params, state, top=0)


def chunks(prompts):
    """The prompts in pieces `[B, CHUNK]`, and which of their tokens are some."""
    for at in range(0, max(map(len, prompts)), CHUNK):
        tokens, valid = np.zeros((len(prompts), CHUNK), np.int32), np.zeros((len(prompts), CHUNK), bool)
        for row, ids in enumerate(prompts):
            piece = ids[at : at + CHUNK]
            tokens[row, : len(piece)], valid[row, : len(piece)] = piece, True
        yield tokens, valid


def generate(params, cfg, drafter, spec, prompts, requests=None, steps=1000):
    """Token ids of each sequence until all have ended or after so many steps, and the state then."""
    state, output = begin(params, cfg, drafter, spec, prompts, requests)
    texts = [[] for _ in prompts]
    short = spec.verify_tokens if always_long(spec, drafter.draft_tokens) else drafter.draft_tokens
    for n in range(steps + 1):
        for row, text in enumerate(texts):
            text += np.asarray(output.tokens[row, : int(output.emitted[row])]).tolist()
        if n == steps or not state.decode.active.any():
            break
        length = spec.verify_tokens if (output.long & state.decode.active).any() else short
        state, output = step(params, cfg, drafter, spec, state, verify_tokens=length, top=0)
    return texts, state


def assert_same_mtp_cache(state, texts, atol=1e-4):
    """P - 1 rows for P tokens, equal to those of a prefill of the texts by the small model."""
    read, _ = begin(small_params(), SMALL, script(texts), SpecConfig(verify_tokens=DRAFTS), texts)
    for row, text in enumerate(texts):
        assert int(state.decode.model.lengths[row]) == len(text)
        pages = np.asarray(state.decode.model.block_table)[row]
        for got, want in zip(jax.tree.leaves(state.drafter), jax.tree.leaves(read.drafter), strict=True):
            got, want = (np.asarray(t)[0, pages].reshape(CAPACITY, -1)[: len(text) - 1] for t in (got, want))
            np.testing.assert_allclose(got, want, atol=atol)


@functools.partial(jax.jit, static_argnames="cfg")
def _plain_step(params, cfg, state):
    return decode.decode_step(params, cfg, state, 0)


def plain(params, cfg, prompts, n, requests=None):
    """`n` tokens of each sequence by plain decoding, and the state then; stop ids and limits are not heeded."""
    requests = requests or [GREEDY] * len(prompts)
    active = jnp.ones(len(prompts), bool)
    model = init_state(cfg, StateConfig(len(prompts), CAPACITY, page=16))
    state = decode.start(cfg, model, sampler_of(cfg, requests, prompts), active)
    for tokens, valid in chunks(prompts):
        state = _plain_prefill(params, cfg, tokens, valid, state)
    state, output = _plain_emit(params, state)
    texts = [[] for _ in prompts]
    for i in range(n):
        for text, token in zip(texts, np.asarray(output.tokens)[:, 0].tolist(), strict=True):
            text.append(token)
        if i < n - 1:
            state, output = _plain_step(params, cfg, state.replace(active=active))
    return texts, state


_plain_prefill = jax.jit(decode.prefill, static_argnames="cfg")
_plain_emit = jax.jit(lambda params, state: decode.emit(params, state, 0))
