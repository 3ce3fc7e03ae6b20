"""Teacher-forced acceptance: how many of a drafter's drafts a given text accepts, whatever the model would have said.

Texts of two runs part at the first near-tie, and what is accepted afterwards says little about the drafter. Along one
fixed text, drafters and settings can be compared exactly.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax import speculative
from qwen38_jax.block_length import always_long
from qwen38_jax.config import ModelConfig
from qwen38_jax.drafters.interface import Drafter
from qwen38_jax.params import Params
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.speculative import Counts
from qwen38_jax.state import StateConfig, init_state

_CHUNK = 256
_LEAST_CAPACITY = 512


def forced_acceptance(
    params: Params, cfg: ModelConfig, drafter: Drafter, spec: SpecConfig, prompt: Sequence[int], output: Sequence[int]
) -> Counts:
    """Counts of greedy drafts along `output`, the tokens that followed `prompt`; NumPy arrays of batch 1.

    As in generation a step emits the drafts that agree and one token more, and the first token takes no step: tokens a
    step are `(len(output) - 1) / steps`.

    Raises:
      ValueError: the prompt is empty, the output has fewer than 2 tokens, or an id is outside the vocabulary.
    """
    text = np.concatenate([np.asarray(prompt, np.int64), np.asarray(output, np.int64)])
    if not len(prompt) or len(output) < 2:
        raise ValueError(f"needs a prompt and at least 2 tokens after it, got {len(prompt)} and {len(output)}")
    if ((text < 0) | (text >= cfg.vocab_size)).any():
        raise ValueError(f"token ids must be in [0, {cfg.vocab_size - 1}], got {text.min()} to {text.max()}")
    capacity = max(_LEAST_CAPACITY, 1 << (len(text) - 1).bit_length())
    sizes = StateConfig(1, capacity, rows=spec.verify_tokens + 1)
    greedy = SamplingParams(temperature=0.0, seed=0)
    ids = {"vocab_size": cfg.vocab_size, "real_vocab_size": cfg.vocab_size, "eos_ids": ()}
    sampler = sampler_state([greedy], [()], **ids)
    limit, active = jnp.array([len(output)]), jnp.ones(1, bool)
    state = speculative.start(cfg, drafter, spec, sizes, init_state(cfg, sizes), sampler, active, limit)
    for first in range(0, len(prompt), _CHUNK):
        tokens, valid = np.zeros((2, 1, _CHUNK), np.int32)
        piece = text[first : min(first + _CHUNK, len(prompt))]
        tokens[0, : len(piece)], valid[0, : len(piece)] = piece, 1
        state = _prefill(params, cfg, drafter, tokens, valid.astype(bool), state)
    padded = jnp.asarray(np.pad(text, (0, capacity - len(text)))[None], jnp.int32)
    anchor = jnp.asarray(text[len(prompt)][None], jnp.int32)
    state = state.replace(
        decode=state.decode.replace(token=anchor, generated=jnp.ones(1, jnp.int32)),
        history=state.history.at[:, len(prompt)].set(anchor),
    )
    short = spec.verify_tokens if always_long(spec, drafter.draft_tokens) else drafter.draft_tokens
    long = state.block.long
    while state.decode.active.any():
        length = spec.verify_tokens if long.any() else short
        state, output = _step(params, cfg, drafter, spec, state, padded, verify_tokens=length)
        long = output.long
    return jax.device_get(state.counts)


_prefill = jax.jit(speculative.prefill, static_argnames="cfg", donate_argnames="state")
_step = jax.jit(speculative.forced_step, static_argnames=("cfg", "spec", "verify_tokens"), donate_argnames="state")
