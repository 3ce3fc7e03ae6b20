"""What speculation did for one request."""

import dataclasses

import numpy as np

from qwen38_jax.drafters.interface import SOURCES
from qwen38_jax.speculative import Counts


@dataclasses.dataclass(frozen=True)
class Drafts:
    """Drafts that were verified and that were emitted, by their place in the block, the first behind the anchor."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SpeculationMetrics:
    """Counts over the decode steps of one request.

    Attributes:
      draft_tokens: drafts of the drafter itself in every step. verify_tokens: drafts that a block has at most.
      steps: decode steps; emitted: tokens that came out of them, one a step and the accepted drafts. Up to a stop
        string that ends inside the last block these are more than the request's tokens.
      tokens_per_step, ms_per_step: None without a step. Milliseconds are those of the whole batch's step.
      long_block_share: steps with a long block, of all.
      by_position: all drafts; by_source: those of each source that drafted at all, of `interface.SOURCES`.
      compiled_programs: that the batch ran on: prefill chunks, first token, one a block length.
    """

    draft_tokens: int
    verify_tokens: int
    steps: int
    emitted: int
    tokens_per_step: float | None
    ms_per_step: float | None
    long_block_share: float
    by_position: Drafts
    by_source: dict[str, Drafts]
    compiled_programs: int


def metrics(
    counts: Counts, row: int, *, draft_tokens: int, decode_seconds: float, compiled_programs: int
) -> SpeculationMetrics:
    """Those of sequence `row`; `counts` holds NumPy arrays."""
    steps = int(counts.steps[row])
    drafted, accepted = counts.drafted[row], counts.accepted[row]
    emitted = steps + int(accepted.sum())
    return SpeculationMetrics(
        draft_tokens=draft_tokens,
        verify_tokens=drafted.shape[-1],
        steps=steps,
        emitted=emitted,
        tokens_per_step=emitted / steps if steps else None,
        ms_per_step=1000 * decode_seconds / steps if steps else None,
        long_block_share=int(counts.long_steps[row]) / max(steps, 1),
        by_position=_drafts(drafted.sum(axis=0), accepted.sum(axis=0)),
        by_source={name: _drafts(drafted[i], accepted[i]) for i, name in enumerate(SOURCES) if drafted[i].any()},
        compiled_programs=compiled_programs,
    )


def _drafts(drafted: np.ndarray, accepted: np.ndarray) -> Drafts:
    return Drafts(tuple(drafted.tolist()), tuple(accepted.tolist()))
