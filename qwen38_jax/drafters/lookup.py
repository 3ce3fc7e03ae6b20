"""Drafts looked up in the text itself: what followed the last occurrence of its end."""

import jax
import jax.numpy as jnp
from flax import struct

from qwen38_jax.config import ModelConfig
from qwen38_jax.drafters.interface import LOOKUP_HEAD, LOOKUP_TAIL, DraftContext, Observed, Proposal
from qwen38_jax.params import Params
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import StateConfig

Array = jax.Array


@struct.dataclass
class Match:
    """tokens: `[B, k]` int32 that followed the match; length: `[B]` int32 of the match, 0 where there is none.

    valid: `[B]` int32, how many of the tokens there are. distance: `[B]` int32, how far before the text's end the match
      ends; where there is none, that of the last one.
    """

    tokens: Array
    length: Array
    valid: Array
    distance: Array


def suffix_match(history: Array, last: Array, distance: Array, k: int, *, nmin: int, nmax: int, search: int) -> Match:
    """Finds the longest earlier occurrence of the text's end.

    Of equally long ones it is that which continues the last match, else the most recent.
    An occurrence may overlap the end itself: a text of period p is followed by its last p tokens, no further. A text of
    fewer than nmin + 2 tokens has none.

    Args:
      history: `[B, N]` int32; what lies behind `last [B]`, the index of the last token, is not read.
      distance: `[B]` int32, that of the last match, 0 before any. A text that copies another keeps its distance, and
        what is also found elsewhere does not lead it astray.
      k: tokens wanted.
      nmin, nmax, search: as in `SpecConfig`. nmax * N must be below 2^31.

    Raises:
      ValueError: nmax * N is not.
    """
    size = history.shape[1]
    if nmax * size >= 2**31:
        raise ValueError(f"a match of {nmax} tokens in a history of {size} overflows: lower nmax")
    ends = jnp.arange(size)
    alive = jnp.ones(history.shape, bool)
    lengths = jnp.zeros(history.shape, jnp.int32)
    padded = jnp.pad(history, ((0, 0), (nmax, 0)), constant_values=-1)  # no token: matches do not run off the start
    for back in range(nmax):
        token = jnp.take_along_axis(padded, last[:, None] + (nmax - back), axis=1)
        alive &= padded[:, nmax - back : nmax - back + size] == token
        lengths += alive
    first = jnp.maximum(nmin - 1, last + 1 - search)[:, None]
    eligible = (ends >= first) & (ends < last[:, None]) & (lengths >= nmin) & (last > nmin)[:, None]
    continuing = jnp.where(distance > 0, last - distance, size)
    # A match ends before the last token, none at size - 1.
    preference = jnp.where(ends == continuing[:, None], size - 1, ends)
    best = jnp.max(jnp.where(eligible, lengths * size + preference, -1), axis=1)
    length, end = jnp.maximum(best, 0) // size, jnp.maximum(best, 0) % size
    end = jnp.where(end == size - 1, continuing, end)
    at = jnp.minimum(end[:, None] + 1 + jnp.arange(k), size - 1)
    return Match(
        tokens=jnp.take_along_axis(history, at, axis=1),
        length=length,
        valid=jnp.where(length > 0, jnp.minimum(k, last - end), 0),
        distance=jnp.where(length > 0, last - end, distance),
    )


def fuse(proposal: Proposal, match: Match, spec: SpecConfig) -> tuple[Proposal, Array]:
    """Replaces a drafter's D drafts by the tokens looked up, and continues with those, up to k.

    A token that was looked up is a point mass. Where it was taken because it agrees with a draft, it is that draft and
    keeps its distribution: whether it would be taken depends on the draw.

    Returns:
      k drafts, those that neither of the two provides not valid; `[B]` bool, whether the match is long and reaches
      behind the drafter's tokens, a reason for a long block.
    """
    drafts, k = proposal.tokens.shape[1], match.tokens.shape[1]
    kept = min(drafts, k)
    proposal = resize(proposal, k)
    index = jnp.arange(k)
    found = index < match.valid[:, None]
    same = found & (index < kept) & proposal.valid & (proposal.tokens == match.tokens)
    agree = jnp.sum(jnp.cumprod(same, axis=1), axis=1)
    strong = match.length >= spec.nstrong
    agreed = (match.length >= spec.nmin) & (agree >= spec.agree)
    take_head = strong | agreed
    take_tail = (match.length >= spec.nmin_tail) & (take_head | (agree >= drafts))
    taken = jnp.where(index < drafts, take_head[:, None], take_tail[:, None]) & found
    drawn = (index < min(spec.agree, drafts)) & ~strong[:, None]
    fused = proposal.replace(
        tokens=jnp.where(taken, match.tokens, proposal.tokens),
        point_mass=jnp.where(taken & ~drawn, True, proposal.point_mass),
        valid=proposal.valid | taken,
        source=jnp.where(taken, jnp.where(index < drafts, LOOKUP_HEAD, LOOKUP_TAIL), proposal.source),
    )
    return fused, (match.length >= spec.longmin) & (match.valid > drafts) & take_tail


def resize(proposal: Proposal, k: int) -> Proposal:
    """The first k drafts, or all and then some that are not valid."""

    def resized(values):
        missing = max(k - values.shape[1], 0)
        return jnp.pad(values[:, :k], ((0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)))

    return jax.tree.map(resized, proposal)


@struct.dataclass
class NoDrafter:
    """Proposes nothing of its own: what is verified is what the lookup finds."""

    name = ""

    @property
    def draft_tokens(self) -> int:
        return 0

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return ()

    def init(self, cfg: ModelConfig, sizes: StateConfig) -> None:
        return None

    def propose(self, params: Params, cfg: ModelConfig, context: DraftContext, state: None) -> tuple[Proposal, None]:
        none = jnp.zeros((len(context.anchor), 0), jnp.int32)
        wide = jnp.zeros((*none.shape, 0))
        return Proposal(none, wide.astype(jnp.int32), wide, none.astype(bool), none.astype(bool), none), None

    def observe(self, params: Params, cfg: ModelConfig, rows: Observed, state: None) -> None:
        return None
