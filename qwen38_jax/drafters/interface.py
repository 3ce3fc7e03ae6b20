"""What the decode step and its drafters say to each other.

A drafter is a pytree: its own parameters are leaves, its sizes static fields, so that it passes into a compiled step as
it is. It carries a state of its own (caches) from step to step. In every step it proposes tokens to follow the anchor,
the last emitted token, which the model has not read yet; the model verifies them; the drafter then observes the rows
that stay.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from qwen38_jax.config import ModelConfig
from qwen38_jax.params import Params
from qwen38_jax.sampling import DRAFT, SamplerState, row_keys
from qwen38_jax.state import StateConfig
from qwen38_jax.tree import Tree

Array = jax.Array

# Who proposed a token, for the counts of what was drafted and accepted.
MTP, DFLASH2, LOOKUP_HEAD, LOOKUP_TAIL = range(4)
SOURCES = ("mtp", "dflash2", "lookup_head", "lookup_tail")

_FINITE = 1e30  # stands for infinite scores


@struct.dataclass
class Proposal:
    """K drafts a sequence; draft i, counted from 0, is for position P + 1 + i where the anchor is at P.

    tokens: `[B, K]` int32.
    candidates: `[B, K, C]` int32 ids that the draft was drawn from; an id outside the vocabulary is no candidate.
    log_q: `[B, K, C]` fp32, the log-probability that it was drawn with, normalised; -inf for what could not be.
    point_mass: `[B, K]` bool, q is 1 at the token and `log_q` is not read.
    valid: `[B, K]` bool; the first draft that is not valid ends the chain. Must not depend on what was drawn for it.
    source: `[B, K]` int32, one of `SOURCES`.
    """

    tokens: Array
    candidates: Array
    log_q: Array
    point_mass: Array
    valid: Array
    source: Array


@struct.dataclass
class DraftContext:
    """What a drafter may read when it proposes.

    anchor: `[B]` int32, the last emitted token. position: `[B]` int32, its absolute position P; tokens 0..P-1 were
      observed.
    hidden: `[B, H]`, the model's row (after the final norm) at P - 1.
    history: `[B, capacity]` int32, the tokens 0..P of prompt and output; whatever lies behind means nothing.
    active: `[B]` bool; nothing depends on what is proposed for the others.
    sampler: parameters and keys of the requests.
    block_table: `[B, max_pages]` int32, the model's, for caches in pages of the same size.
    """

    anchor: Array
    position: Array
    hidden: Array
    history: Array
    active: Array
    sampler: SamplerState
    block_table: Array


@struct.dataclass
class Observed:
    """Rows of a prefill chunk or a verify block, which the model has read.

    tokens, positions: `[B, L]` int32, absolute. valid: `[B, L]` bool, the rows that stay: one run a sequence, possibly
      empty; rejected drafts and padding are not among them and must leave no trace.
    hidden: `[B, L, H]`, the model's rows after the final norm.
    taps: `[len(tap_layers), B, L, H]`, the residual stream after the drafter's `tap_layers`, in their order.
    before: `[B, H]`, the model's row at the position before the first valid one; meaningless at position 0.
    block_table: `[B, max_pages]` int32, the model's.
    """

    tokens: Array
    positions: Array
    valid: Array
    hidden: Array
    taps: Array
    before: Array
    block_table: Array


def point_masses(tokens: Array, valid: Array, source: int) -> Proposal:
    """Drafts `tokens [B, K]` that were not drawn, as those of a tree."""
    none = jnp.zeros((*tokens.shape, 0))
    sure = jnp.ones_like(valid)
    return Proposal(tokens, none.astype(jnp.int32), none, sure, valid, jnp.full_like(tokens, source))


class Drafter(Protocol):
    """What drafts.

    name: one of `SOURCES` that says what proposes, empty for a drafter without tokens of its own. draft_tokens: K, how
    many drafts `propose` returns. tap_layers: what `Observed.taps` must hold.
    """

    name: str

    @property
    def draft_tokens(self) -> int: ...

    @property
    def tap_layers(self) -> tuple[int, ...]: ...

    def init(self, cfg: ModelConfig, sizes: StateConfig) -> Any:
        """The state (a pytree of arrays) before the first token of `sizes.batch` sequences of `sizes.capacity`."""

    def propose(self, params: Params, cfg: ModelConfig, context: DraftContext, state: Any) -> tuple[Proposal, Any]:
        """Drafts to follow the anchors. `params` and `cfg` are the target's, whose embedding and head may be shared."""

    def propose_tree(
        self, params: Params, cfg: ModelConfig, context: DraftContext, state: Any, tree: Tree
    ) -> tuple[Proposal, Any]:
        """Drafts of `tree.paths`, in their order: point masses, of which none may depend on what the model draws."""

    def observe(self, params: Params, cfg: ModelConfig, rows: Observed, state: Any) -> Any:
        """The state after the model has read `rows`: called for every prefill chunk and after every verify block."""


def draft_log_q(scores: Array, sampler: SamplerState, truncate: bool) -> Array:
    """The distribution that a draft is drawn from, over its candidates: normalised, at the request's temperature.

    A NaN counts as the lowest score and infinities as finite ones, so that some candidate can always be drawn.

    Args:
      scores: `[B, C]`, a drafter's logits of C candidates.
      sampler: B requests. A greedy one gets a point mass on the first of its highest scores.
      truncate: also cut by the request's top-k and top-p, as far as the candidates tell: a candidate stays if fewer
        than top-k, and less than top-p of the probability, score strictly higher.

    Returns:
      `[B, C]` fp32 log-probabilities.
    """
    scores = jnp.nan_to_num(scores.astype(jnp.float32), nan=-_FINITE, posinf=_FINITE, neginf=-_FINITE)
    scores = jnp.clip(scores, -_FINITE, _FINITE)
    greedy = (sampler.temperature == 0)[:, None]
    shifted = scores - jnp.max(scores, axis=-1, keepdims=True)
    log_q = jax.nn.log_softmax(shifted / jnp.where(greedy, 1.0, sampler.temperature[:, None]), axis=-1)
    if truncate:
        higher = log_q[:, None, :] > log_q[:, :, None]  # [B, C, C]: the last axis over what scores higher
        rank = jnp.sum(higher, axis=-1)
        mass = jnp.sum(jnp.where(higher, jnp.exp(log_q)[:, None, :], 0.0), axis=-1)
        top_k, top_p = sampler.top_k[:, None], sampler.top_p[:, None]
        keep = ((rank < top_k) | (top_k == 0)) & ((mass < top_p) | (top_p >= 1))
        log_q = jax.nn.log_softmax(jnp.where(keep, log_q, -jnp.inf), axis=-1)
    best = jnp.arange(scores.shape[-1]) == jnp.argmax(scores, axis=-1, keepdims=True)
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), log_q)


def draw_candidate(log_q: Array, sampler: SamplerState, positions: Array) -> Array:
    """Index `[B]` int32 of the candidate drawn from `log_q [B, C]` for the token at absolute `positions [B]`.

    The draw has a random stream of its own (`sampling.DRAFT`): noise shared with acceptance would bias the output.
    """

    def drawn():
        keys = row_keys(sampler.key_data, positions, DRAFT)
        return jax.vmap(jax.random.categorical)(keys, log_q).astype(jnp.int32)

    greedy = jnp.all(sampler.temperature == 0)
    return jax.lax.cond(greedy, lambda: jnp.argmax(log_q, axis=-1).astype(jnp.int32), drawn)
