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
from qwen38_jax.params import Params, tree_bytes
from qwen38_jax.sampling import token_logprobs
from qwen38_jax.state import State, StateConfig, abstract_state, init_state

_CHUNK = 256  # rows scored at a time; a chunk's logits are [256, V] fp32


@dataclasses.dataclass(frozen=True)
class Score:
    """`logprobs[i]` is that of `token_ids[i + 1]` after the tokens before it, natural logarithm."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """`exp` of the mean loss; infinite where that overflows."""
        loss = -sum(self.logprobs) / len(self.logprobs)
        return math.exp(loss) if loss < 700 else math.inf


def score(params: Params, cfg: ModelConfig, token_ids: Sequence[int], *, real_vocab_size: int) -> Score:
    """Scores a text, teacher-forced.

    Args:
      token_ids: at least two, at most the model's context.
      real_vocab_size: ids from here on are padding; they get no probability.

    Raises:
      ValueError: too few or too many tokens, an id outside the vocabulary, or a result that no working model gives:
        NaN, or a perplexity that is exactly the vocabulary's size, which is what all-equal logits look like.
    """
    if not 2 <= len(token_ids) <= cfg.max_position_embeddings:
        raise ValueError(f"a score needs 2 to {cfg.max_position_embeddings} tokens, got {len(token_ids)}")
    for i in token_ids:
        if not 0 <= i < real_vocab_size:
            raise ValueError(f"token id {i} is not in [0, {real_vocab_size - 1}]")
    ids = np.asarray(token_ids, np.int64)
    state = init_state(cfg, _sizes(len(ids)))
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
    if not all(map(math.isfinite, (*result.logprobs, result.perplexity))):
        raise ValueError("the model gave a log-probability that is not finite: the checkpoint or its dtype is broken")
    if len(ids) > 16 and math.isclose(result.perplexity, real_vocab_size, rel_tol=1e-6):
        raise ValueError(f"perplexity equals the vocabulary's size, {real_vocab_size}: the output head is not loaded")
    return result


def score_bytes(cfg: ModelConfig, tokens: int) -> int:
    """Bytes that `score` allocates for its state and for the logits of a chunk, beside the parameters."""
    return tree_bytes(abstract_state(cfg, _sizes(tokens))) + 3 * 4 * _CHUNK * cfg.vocab_size


def _sizes(tokens: int) -> StateConfig:
    return StateConfig(1, max(512, 1 << (tokens - 1).bit_length()))


@functools.cache
def _scorer(cfg: ModelConfig, real_vocab_size: int):
    @functools.partial(jax.jit, donate_argnames="state")
    def step(params: Params, tokens: jax.Array, targets: jax.Array, valid: jax.Array, state: State):
        hidden, _, state = forward(params, cfg, chain_block(tokens, state.lengths, valid), state, commit=True)
        values, _, _ = token_logprobs(logits(params, hidden), jnp.asarray(targets), 0, real_vocab_size=real_vocab_size)
        return values, state

    return step
