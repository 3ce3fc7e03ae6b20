"""Log-probabilities of given tokens, and the perplexity they make."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

from qwen38_jax.config import ModelConfig
from qwen38_jax.evaluation.hidden import CHUNK, hidden_chunks
from qwen38_jax.model import logits
from qwen38_jax.params import Params
from qwen38_jax.sampling import token_logprobs


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
    ids = np.asarray(token_ids, np.int32)
    targets = np.pad(ids[1:], (0, -len(ids[1:]) % CHUNK)).reshape(-1, CHUNK)
    chunks = zip(targets, hidden_chunks(params, cfg, ids[:-1]), strict=True)
    values = np.concatenate([_logprobs(params, hidden, row, real_vocab_size) for row, hidden in chunks])
    result = Score(tuple(ids.tolist()), tuple(values[: len(ids) - 1].tolist()))
    if not all(map(math.isfinite, (*result.logprobs, result.perplexity))):
        raise ValueError("the model gave a log-probability that is not finite: the checkpoint or its dtype is broken")
    if len(ids) > 16 and math.isclose(result.perplexity, real_vocab_size, rel_tol=1e-6):
        raise ValueError(f"perplexity equals the vocabulary's size, {real_vocab_size}: the output head is not loaded")
    return result


@functools.partial(jax.jit, static_argnames="real_vocab_size")
def _logprobs(params: Params, hidden: jax.Array, targets: jax.Array, real_vocab_size: int) -> jax.Array:
    values, _, _ = token_logprobs(logits(params, hidden), targets, 0, real_vocab_size=real_vocab_size)
    return values
