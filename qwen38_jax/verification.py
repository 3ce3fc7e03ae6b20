"""Which drafts stay, and the token after them: exact for any drafter that tells how it drew.

Speculative sampling (Leviathan et al., 2023; Chen et al., 2023): a draft x that was drawn from q is kept with
probability min(1, p(x) / q(x)), where p is the target's own distribution; where one is not kept, the next token is
drawn from max(p - q, 0), normalised; after a block that is kept entirely, from p. The result is distributed as p.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen38_jax.drafters.interface import Proposal
from qwen38_jax.sampling import ACCEPT, RESIDUAL, TARGET, SamplerState, row_keys, sample
from qwen38_jax.tree import Tree

Array = jax.Array

_TOTAL_TOLERANCE = 1e-3  # by which rounding may let a log-probability exceed 0


@struct.dataclass
class Verdict:
    """tokens: `[B, K + 1]` int32, the drafts that stay, then one more token; meaningless behind it.

    accepted: `[B]` int32 in [0, K], how many drafts stay.
    rows: of a tree of depth D, whose K is D here, `[B, D + 1]` int32: the rows of the block on the path that stays, the
      anchor's first; meaningless behind it. None for a chain, whose rows are in order.
    """

    tokens: Array
    accepted: Array
    rows: Array | None = None


def verify(log_p: Array, proposal: Proposal, sampler: SamplerState, positions: Array) -> Verdict:
    """Judges chains of K drafts.

    A draft that is not valid ends its chain; so does one whose id is not in the vocabulary, whose distribution is
    broken (NaN, infinite, more than 1), or which that distribution cannot have yielded: the token in its place is then
    drawn from p, as if nothing had been proposed.

    Args:
      log_p: `[B, K + 1, V]`, the target's processed log-probabilities; row i is for the token in place of draft i.
      proposal: K drafts a sequence.
      sampler: B requests. For a greedy one a draft stays if it is the argmax, and q plays no part.
      positions: `[B]` int32, the absolute position of the first draft.
    """
    with jax.named_scope("accept"):
        at = positions[:, None] + jnp.arange(log_p.shape[1])
        usable, log_q = _log_q_of_drafts(proposal, log_p.shape[-1])
        stays = usable & _stays(log_p, proposal.tokens, log_q, sampler, at[:, :-1])
        accepted = jnp.sum(jnp.cumprod(stays, axis=1), axis=1, dtype=jnp.int32)
        tested = jnp.pad(usable, ((0, 0), (0, 1)))  # the last row has no draft to test
        rejected = jnp.take_along_axis(tested, accepted[:, None], axis=1)[:, 0]
        row = jnp.take_along_axis(log_p, accepted[:, None, None], axis=1)[:, 0]
        if proposal.tokens.shape[1]:
            from_residual = rejected & (sampler.temperature > 0)
            row = jax.lax.cond(
                jnp.any(from_residual),
                lambda: jnp.where(from_residual[:, None], _log_residual(row, proposal, accepted), row),
                lambda: row,
            )
        last = sample(row, sampler, positions + accepted, jnp.where(rejected, RESIDUAL, TARGET))
        tokens = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(jnp.arange(log_p.shape[1]) == accepted[:, None], last[:, None], tokens)
        return Verdict(tokens, accepted)


def walk_tree(said: Array, drafts: Array, valid: Array, tree: Tree) -> Verdict:
    """Which path down a tree of drafts stays: the one that the target's own draws take.

    From a row the path goes to the draft that is the token drawn there, and ends where there is none. Every token is a
    draw of the target's, so this is exact for any tree that was built before the draws; no q is needed.

    Args:
      said: `[B, rows]` int32, the token drawn (or forced) after each row.
      drafts: `[B, rows - 1]` int32; valid: `[B, rows - 1]` bool, never true below a draft for which it is not. Of
        equal drafts that follow the same row the first counts.
    """
    with jax.named_scope("accept"):
        parents, ancestors = tree.parents[1:], tree.ancestors
        elder = (parents[:, None] == parents) & np.tri(len(parents), k=-1, dtype=bool)
        repeated = jnp.any(elder & (drafts[:, :, None] == drafts[:, None, :]) & valid[:, None, :], axis=2)
        fits = valid & ~repeated & (drafts == said[:, parents])
        fits = jnp.pad(fits, ((0, 0), (1, 0)), constant_values=True)  # the anchor
        stays = jnp.all(fits[:, None, :] | ~ancestors, axis=2)
        at_depth = stays[:, None, :] & (tree.depths == np.arange(tree.depth + 1)[:, None])
        rows = jnp.argmax(at_depth, axis=2).astype(jnp.int32)
        accepted = jnp.sum(stays, axis=1, dtype=jnp.int32) - 1
        return Verdict(jnp.take_along_axis(said, rows, axis=1), accepted, rows)


def _log_q_of_drafts(proposal: Proposal, vocab_size: int) -> tuple[Array, Array]:
    """Whether each draft can be judged, and the log-probability it was drawn with; both `[B, K]`."""
    own = proposal.candidates == proposal.tokens[..., None]
    log_q = jax.nn.logsumexp(jnp.where(own, proposal.log_q, -jnp.inf), axis=-1)
    sound = jnp.all(proposal.log_q <= _TOTAL_TOLERANCE, axis=-1)  # not so for a NaN
    log_q = jnp.where(proposal.point_mass, 0.0, log_q)
    known = (proposal.tokens >= 0) & (proposal.tokens < vocab_size)
    return proposal.valid & known & (proposal.point_mass | (sound & (log_q > -jnp.inf))), log_q


def _stays(log_p: Array, drafts: Array, log_q: Array, sampler: SamplerState, positions: Array) -> Array:
    """`[B, K]` bool: the outcome of each draft's test, were the ones before it accepted."""
    ids = jnp.clip(drafts, 0, log_p.shape[-1] - 1)
    log_p = jnp.take_along_axis(log_p[:, :-1], ids[..., None], axis=-1)[..., 0]
    greedy = sampler.temperature == 0

    def tested():
        keys = row_keys(sampler.key_data, positions, ACCEPT).reshape(-1)
        noise = jax.vmap(jax.random.uniform)(keys).reshape(positions.shape)
        return jnp.where(greedy[:, None], log_p > -jnp.inf, log_p > jnp.log(noise) + log_q)

    return jax.lax.cond(jnp.all(greedy), lambda: log_p > -jnp.inf, tested)


def _log_residual(log_p: Array, proposal: Proposal, index: Array) -> Array:
    """Log of max(p - q, 0), not normalised, `[B, V]`; log p where nothing is left.

    log_p: `[B, V]`, the row in place of draft `index [B]`.
    """

    def at_index(values):
        place = jnp.minimum(index, values.shape[1] - 1).reshape(-1, *[1] * (values.ndim - 1))
        return jnp.take_along_axis(values, place, axis=1)[:, 0]

    token, point_mass = at_index(proposal.tokens), at_index(proposal.point_mass)
    ids, q = at_index(proposal.candidates), jnp.exp(at_index(proposal.log_q))
    ids = jnp.concatenate([jnp.where(point_mass[:, None], -1, ids), jnp.where(point_mass, token, -1)[:, None]], axis=1)
    q = jnp.pad(q, ((0, 0), (0, 1)), constant_values=1.0)
    vocab_size = log_p.shape[-1]
    ids = jnp.where(ids < 0, vocab_size, ids)  # dropped; a negative id would count from the end
    rest = jnp.exp(log_p).at[jnp.arange(len(ids))[:, None], ids].add(-q, mode="drop")
    rest = jnp.log(jnp.maximum(rest, 0.0))
    return jnp.where(jnp.any(rest > -jnp.inf, axis=-1, keepdims=True), rest, log_p)
