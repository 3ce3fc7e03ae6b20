"""Texts that are sampled by the whole step, with its drafters, are distributed as the model says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax import speculative
from qwen38_jax.drafters.modes import cut_draft_head
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.model import logits
from qwen38_jax.sampling import process_logits
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import StateConfig, init_state
from qwen38_jax.training.forward import sequence_forward
from tests.distribution import LENGTH, SAMPLES, V, assert_distributed, batch_of
from tests.drafters.dflash2_golden import CFG, random_drafter
from tests.models import SMALL, small_params

MODEL = dataclasses.replace(SMALL, vocab_size=V, num_hidden_layers=2)
PROMPT = (10, 11, 6, 5, 10, 11)  # the model is likely to go on like this, and then a match is found
# A match of one token counts only if a draft agrees, so that blocks mix drafts of both kinds.
SPEC = SpecConfig(verify_tokens=4, lookup=True, nmin=1, nstrong=2, agree=1, adaptive=False)


@functools.cache
def drafter_of(name):
    """Each drafts from half of the vocabulary at most."""
    if name == "mtp":
        return Mtp(cut_draft_head(small_params(MODEL), range(0, V, 2), vocab_size=V), 3)
    cfg = dataclasses.replace(
        CFG,
        vocab_size=V,
        hidden_size=MODEL.hidden_size,
        num_target_layers=MODEL.num_hidden_layers,
        target_layer_ids=(0, 1),
        mask_token_id=V - 1,
        block_size=4,
        selector_top_k=V // 2,
    )
    return random_drafter(cfg)


@jax.jit
def texts_of(params, drafter, sampler, tokens):
    """The first LENGTH tokens of every request, `[B, LENGTH]`, and how many drafts of each source were accepted."""
    batch = len(sampler.temperature)
    sizes = StateConfig(batch, 16, rows=SPEC.verify_tokens + 1, page=16)
    active, limit = jnp.ones(batch, bool), jnp.full(batch, LENGTH + SPEC.verify_tokens)
    state = speculative.start(MODEL, drafter, SPEC, sizes, init_state(MODEL, sizes), sampler, active, limit)
    state = speculative.prefill(params, MODEL, drafter, tokens, tokens >= 0, state)
    state, _ = speculative.emit(params, state, 0)

    def step(_, state):
        return speculative.decode_step(params, MODEL, drafter, SPEC, state, verify_tokens=SPEC.verify_tokens, top=0)[0]

    state = jax.lax.fori_loop(0, LENGTH - 1, step, state)
    return state.history[:, len(PROMPT) : len(PROMPT) + LENGTH], state.counts.accepted.sum((0, 2))


@jax.jit
def exact(params, sampler):
    """`[V ** LENGTH]`: the probability of every text; `sampler` has V ** (LENGTH - 1) requests."""
    prefixes = jnp.stack(jnp.unravel_index(jnp.arange(V ** (LENGTH - 1)), (V,) * (LENGTH - 1)), axis=1)
    prompt = jnp.broadcast_to(jnp.array(PROMPT), (len(prefixes), len(PROMPT)))
    scores = logits(params, sequence_forward(params, MODEL, jnp.concatenate([prompt, prefixes], axis=1)))
    scores = scores[:, len(PROMPT) - 1 :]
    p = jnp.exp(process_logits(scores, sampler, jnp.broadcast_to(jnp.arange(LENGTH), scores.shape[:2])))
    joint = p[:, -1]
    for i in range(LENGTH - 1):
        joint = joint * jnp.take_along_axis(p[:, i], prefixes[:, i : i + 1], axis=1)
    return joint.reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp", "dflash2"])
def test_blocks_of_a_drafter_and_a_lookup(name):
    params, accepted = small_params(MODEL), 0
    prompts = jnp.broadcast_to(jnp.array(PROMPT), (SAMPLES, len(PROMPT)))
    for temperature, filters in ((0.5, {}), (1.0, {}), (1.5, {}), (1.0, {"top_k": 5, "top_p": 0.9})):
        request = SamplingParams(temperature=temperature, **filters)
        texts, counts = texts_of(params, drafter_of(name), batch_of(request, SAMPLES), prompts)
        assert_distributed(texts, exact(params, batch_of(request, V ** (LENGTH - 1))))
        accepted += np.asarray(counts)
    own, found = accepted[:2].sum(), accepted[2:].sum()
    assert own > 1000 and found > 1000
