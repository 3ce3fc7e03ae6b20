"""The rows that the output head reads, and the layers' outputs that a drafter does, for given texts."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from qwen38_jax.block import chain_block
from qwen38_jax.config import ModelConfig
from qwen38_jax.model import forward
from qwen38_jax.params import Params
from qwen38_jax.state import State, StateConfig, capacity_for, init_state

Array = jax.Array

CHUNK = 256  # rows at a time


class ChunkRows(NamedTuple):
    """Rows of B texts: `hidden [B, CHUNK, H]` after the final norm, `taps [len(tap_layers), B, CHUNK, H]`."""

    hidden: Array
    taps: Array


def text_chunks(
    params: Params, cfg: ModelConfig, texts: Sequence[Sequence[int]], tap_layers: tuple[int, ...] = ()
) -> Iterator[ChunkRows]:
    """Rows of several texts, teacher-forced, CHUNK of each at a time until the longest ends.

    The row of index i scores token i + 1. What a chunk holds beyond the end of a text is arbitrary.
    """
    longest = max(map(len, texts))
    state = init_state(cfg, StateConfig(len(texts), capacity_for(longest)))
    step = _step(cfg, tap_layers)
    for start in range(0, longest, CHUNK):
        tokens, valid = np.zeros((len(texts), CHUNK), np.int32), np.zeros((len(texts), CHUNK), bool)
        for row, text in enumerate(texts):
            piece = text[start : start + CHUNK]
            tokens[row, : len(piece)], valid[row, : len(piece)] = piece, True
        rows, state = step(params, tokens, valid, state)
        yield rows


def hidden_chunks(params: Params, cfg: ModelConfig, token_ids: Sequence[int]) -> Iterator[Array]:
    """The hidden rows of one text, `[CHUNK, H]` at a time; see `text_chunks`."""
    for rows in text_chunks(params, cfg, [np.asarray(token_ids, np.int32)]):
        yield rows.hidden[0]


@functools.cache
def _step(cfg: ModelConfig, tap_layers: tuple[int, ...]):
    @functools.partial(jax.jit, donate_argnames="state")
    def step(params: Params, tokens: Array, valid: Array, state: State) -> tuple[ChunkRows, State]:
        block = chain_block(tokens, state.lengths, valid)
        hidden, taps, state = forward(params, cfg, block, state, commit=True, tap_layers=tap_layers)
        return ChunkRows(hidden, taps), state

    return step
