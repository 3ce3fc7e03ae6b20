"""A back-off n-gram model over token ids: what can be predicted without reading further than a few tokens."""

import dataclasses
from collections.abc import Sequence

import numpy as np

DISCOUNT = 0.75  # taken off every count and given to the shorter context


@dataclasses.dataclass(frozen=True)
class Level:
    """The n-grams of one length, sorted: `keys [n] int64` are (index of the n-gram without its last token) * V + last.

    `counts [n]` says how often each occurs. The children of n-gram i, its continuations, are those entries of the
    next level whose keys lie in [i * V, (i + 1) * V).
    """

    keys: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class NGram:
    """Interpolated absolute discounting (Ney, Essen, Kneser, 1994) over the continuations that were counted."""

    levels: tuple[Level, ...]  # one a length, 1 to the order
    vocab_size: int

    @property
    def order(self) -> int:
        return len(self.levels)

    def probabilities(self, context: Sequence[int]) -> np.ndarray:
        """`[V]` fp64: the distribution of the token after `context`, of which the last `order - 1` tokens count.

        With c the count of a continuation, C their sum and n their number, a context gives
        max(c - D, 0) / C + D n / C * p(shorter context); one that was never met gives what the shorter one does. Below
        single tokens lies the uniform distribution.
        """
        p = np.full(self.vocab_size, 1 / self.vocab_size)
        recent = list(context[max(0, len(context) - self.order + 1) :])
        for start in range(len(recent), -1, -1):
            found = self._continuations(recent[start:])
            if found is None:
                break  # a longer context was not met either
            tokens, counts = found
            total = counts.sum()
            p *= DISCOUNT * len(tokens) / total
            p[tokens] += (counts - DISCOUNT) / total
        return p

    def _continuations(self, context: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens that followed the whole context, and how often; None if it was never met or ended the text."""
        node = 0
        for level, token in zip(self.levels, context, strict=False):
            key = node * self.vocab_size + token
            node = int(np.searchsorted(level.keys, key))
            if node == len(level.keys) or level.keys[node] != key:
                return None
        level = self.levels[len(context)]
        first, last = np.searchsorted(level.keys, [node * self.vocab_size, (node + 1) * self.vocab_size])
        return (level.keys[first:last] % self.vocab_size, level.counts[first:last]) if first < last else None

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, stop_id: int, rng: np.random.Generator | None = None
    ) -> list[int]:
        """Continues `prompt` up to and with `stop_id`: the likeliest token each time, or with `rng` a sampled one."""
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            p = self.probabilities(tokens)
            tokens.append(int(np.argmax(p)) if rng is None else int(rng.choice(len(p), p=p / p.sum())))
            if tokens[-1] == stop_id:
                break
        return tokens[len(prompt) :]


def train_ngram(tokens: np.ndarray, vocab_size: int, order: int) -> NGram:
    """Counts all n-grams of `tokens [n]` up to `order`; separate documents by an end-of-text token.

    About two seconds a length for 10 M tokens. Raises ValueError if there are fewer tokens than the order.
    """
    if len(tokens) < order:
        raise ValueError(f"an n-gram model of order {order} needs at least as many tokens, got {len(tokens)}")
    tokens = tokens.astype(np.int64)
    levels, prefix = [], np.zeros(len(tokens), np.int64)  # index of the n-gram that ends before each token
    for n in range(order):
        keys, index, counts = np.unique(prefix * vocab_size + tokens[n:], return_inverse=True, return_counts=True)
        levels.append(Level(keys, counts))
        prefix = index[:-1]
    return NGram(tuple(levels), vocab_size)
