"""The rows that the output head reads, for given text."""

import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from qwen38_jax.block import chain_block
from qwen38_jax.config import ModelConfig
from qwen38_jax.model import forward
from qwen38_jax.params import Params
from qwen38_jax.state import State, StateConfig, capacity_for, init_state

Array = jax.Array

CHUNK = 256  # rows at a time


def hidden_chunks(params: Params, cfg: ModelConfig, token_ids: Sequence[int]) -> Iterator[Array]:
    """Hidden rows after the final norm, `[CHUNK, H]` at a time, teacher-forced.

    The row of index i scores token i + 1. What the last chunk holds beyond the text is arbitrary.
    """
    ids = np.asarray(token_ids, np.int32)
    state = init_state(cfg, StateConfig(1, capacity_for(len(ids))))
    step = _step(cfg)
    for start in range(0, len(ids), CHUNK):
        piece = ids[start : start + CHUNK]
        tokens, valid = np.zeros((1, CHUNK), np.int32), np.zeros((1, CHUNK), bool)
        tokens[0, : len(piece)], valid[0, : len(piece)] = piece, True
        hidden, state = step(params, tokens, valid, state)
        yield hidden


@functools.cache
def _step(cfg: ModelConfig):
    @functools.partial(jax.jit, donate_argnames="state")
    def step(params: Params, tokens: Array, valid: Array, state: State) -> tuple[Array, State]:
        hidden, _, state = forward(params, cfg, chain_block(tokens, state.lengths, valid), state, commit=True)
        return hidden[0], state

    return step
