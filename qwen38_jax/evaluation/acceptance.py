"""Teacher-forced choices of the trunk and of the MTP head, over whole texts at once."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.config import ModelConfig
from qwen38_jax.model import logits
from qwen38_jax.params import Params
from qwen38_jax.training.forward import mtp_sequence, sequence_forward

Array = jax.Array
LENGTHS = (512, 3072, 16384)  # that texts are padded to: few, since each is a program
REPEATED = 8


class Text(NamedTuple):
    """A prompt and what was, or should have been, answered; token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Choices(NamedTuple):
    """Which tokens of an answer are the likeliest after all those before them.

    trunk: `[n]` bool. head: `[n - 1]` bool, the MTP head's opinion of every token from the second on; it knows the
    tokens before, but the trunk's hidden rows only up to two before. Empty without a head.
    """

    trunk: np.ndarray
    head: np.ndarray


def choices(
    params: Params, cfg: ModelConfig, texts: Iterable[Text], *, real_vocab_size: int, batch: int
) -> list[Choices]:
    """Compares every answer with what the model would have said, teacher-forced.

    The head's entry i is what a drafter proposes at position 1: given the trunk's hidden row that answer token i came
    from and that token itself, the likeliest token i + 1. Along the model's own greedy answer it is accepted if and
    only if it is that token.
    """
    texts = list(texts)
    results: dict[int, Choices] = {}
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].prompt) + len(texts[i].answer))
    for first in range(0, len(texts), batch):
        rows = by_length[first : first + batch]
        tokens = _padded([texts[i] for i in rows], batch)
        trunk, head = jax.device_get(_top_tokens(params, tokens, cfg, real_vocab_size))
        for row, i in enumerate(rows):
            start, answer = len(texts[i].prompt), np.array(texts[i].answer)
            results[i] = Choices(
                trunk[row, start - 1 : start - 1 + len(answer)] == answer,
                head[row, start - 1 : start - 2 + len(answer)] == answer[1 : 1 + head.shape[1]],
            )
    return [results[i] for i in range(len(texts))]


def repeats(answer: Sequence[int]) -> np.ndarray:
    """`[n]` bool: tokens that end a stretch of `REPEATED` tokens which the answer has had before.

    A model that has run into a loop is easily drafted for, and says nothing about the drafter.
    """
    seen, found = set(), np.zeros(len(answer), bool)
    for end in range(REPEATED, len(answer) + 1):
        stretch = tuple(answer[end - REPEATED : end])
        found[end - 1] = stretch in seen
        seen.add(stretch)
    return found


def _padded(texts: Sequence[Text], batch: int) -> np.ndarray:
    """`[batch, T]` int32; what is right of a text does not reach it."""
    longest = max(len(t.prompt) + len(t.answer) for t in texts)
    tokens = np.zeros((batch, next(length for length in LENGTHS if length >= longest)), np.int32)
    for row, text in enumerate(texts):
        ids = (*text.prompt, *text.answer)
        tokens[row, : len(ids)] = ids
    return tokens


@functools.partial(jax.jit, static_argnames=("cfg", "real_vocab_size"))
def _top_tokens(params: Params, tokens: Array, cfg: ModelConfig, real_vocab_size: int) -> tuple[Array, Array]:
    """Likeliest next token of every row `[B, T]`, and the head's likeliest token after that `[B, T - 1]`."""
    hidden = sequence_forward(params, cfg, tokens)

    def top(rows: Array) -> Array:
        return jnp.argmax(logits(params, rows)[..., :real_vocab_size], axis=-1)

    if params.mtp is None:
        return top(hidden), jnp.zeros((tokens.shape[0], 0), jnp.int32)
    return top(hidden), top(mtp_sequence(params, cfg, tokens, hidden))
