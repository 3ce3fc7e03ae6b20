"""Log-probabilities of given tokens, and the perplexity they make."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.block import chain_block
from qwen38_jax.config import ModelConfig
from qwen38_jax.model import forward, logits
from qwen38_jax.params import Params
from qwen38_jax.sampling import token_logprobs
from qwen38_jax.state import State, StateConfig, init_state

_CHUNK = 256  # rows scored at a time; a chunk's logits are [256, V] fp32


@dataclasses.dataclass(frozen=True)
class Score:
    """`logprobs[i]` is that of `token_ids[i + 1]` after the tokens before it, natural logarithm."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def score(params: Params, cfg: ModelConfig, token_ids: Sequence[int], *, real_vocab_size: int) -> Score:
    """Scores a text, teacher-forced.

    Args:
      token_ids: at least two, at most the model's context.
      real_vocab_size: ids from here on are padding; they get no probability.

    Raises:
      ValueError: too few or too many tokens, an id outside the vocabulary, or a result that no working model gives:
        NaN, or a perplexity that is exactly the vocabulary's size, which is what all-equal logits look like.
    """
    ids = np.asarray(token_ids, np.int64)
    if not 2 <= len(ids) <= cfg.max_position_embeddings:
        raise ValueError(f"a score needs 2 to {cfg.max_position_embeddings} tokens, got {len(ids)}")
    outside = ids[(ids < 0) | (ids >= cfg.vocab_size)]
    if outside.size:
        raise ValueError(f"token id {outside[0]} is not in [0, {cfg.vocab_size - 1}]")
    state = init_state(cfg, StateConfig(1, max(512, 1 << (len(ids) - 1).bit_length())))
    step = _scorer(cfg, real_vocab_size)
    parts = []
    for start in range(0, len(ids) - 1, _CHUNK):
        tokens, valid = np.zeros((2, 1, _CHUNK), np.int32), np.zeros((1, _CHUNK), bool)
        n = min(_CHUNK, len(ids) - 1 - start)
        tokens[0, 0, :n], tokens[1, 0, :n] = ids[start : start + n], ids[start + 1 : start + 1 + n]
        valid[0, :n] = True
        values, state = step(params, tokens[0], tokens[1], valid, state)
        parts.append(np.asarray(values)[0, :n])
    result = Score(tuple(ids.tolist()), tuple(np.concatenate(parts).tolist()))
    if not all(map(math.isfinite, result.logprobs)):
        raise ValueError("the model gave a log-probability that is not finite: the checkpoint or its dtype is broken")
    if len(ids) > 16 and math.isclose(result.perplexity, real_vocab_size, rel_tol=1e-6):
        raise ValueError(f"perplexity equals the vocabulary's size, {real_vocab_size}: the output head is not loaded")
    return result


@functools.cache
def _scorer(cfg: ModelConfig, real_vocab_size: int):
    @functools.partial(jax.jit, donate_argnames="state")
    def step(params: Params, tokens: jax.Array, targets: jax.Array, valid: jax.Array, state: State):
        hidden, _, state = forward(params, cfg, chain_block(tokens, state.lengths, valid), state, commit=True)
        values, _, _ = token_logprobs(logits(params, hidden), jnp.asarray(targets), 0, real_vocab_size=real_vocab_size)
        return values, state

    return step
