"""From the rows of a DFlash2 block to drafts: candidates of each row, scores between them, and a walk.

Every row has a few candidates, the likeliest tokens of its own. The score of one after a given predecessor is its
logit plus a product of three codes: of the predecessor, of the row, of the candidate. The walk goes from the anchor to
the right and chooses, greedily or by sampling, after the candidate chosen last; it never looks ahead.

Everything is worked out for all pairs of neighbouring candidates at once; what is left for the walk is to follow a
chain of table look-ups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qwen38_jax.drafters.interface import draft_log_q, draw_candidate
from qwen38_jax.layers.linear import PRECISION, embed, linear
from qwen38_jax.params import CandidateSelector
from qwen38_jax.sampling import SamplerState, mask_padding
from qwen38_jax.tree import Tree

Array = jax.Array


class Lattice(NamedTuple):
    """C candidates in each of D rows, and the scores between them.

    ids: `[B, D, C]` int32, the likeliest first. scores: `[B, D, C, C]` fp32; `scores[b, s, i, j]` is that of candidate
    j of row s after candidate i of row s - 1, and in row 0 after the anchor, whatever i.
    """

    ids: Array
    scores: Array


def make_lattice(
    selector: CandidateSelector | None, hidden: Array, logits: Array, anchor: Array, *, count: int, real_vocab_size: int
) -> Lattice:
    """The `count` candidates of each row and their scores.

    Args:
      selector: None for scores that are the logits, whatever the predecessor.
      hidden: `[B, D, H]`, the rows of the masks after the final norm; logits: `[B, D, V]`, the target's head on them.
      anchor: `[B]` int32 ids.
      real_vocab_size: ids from here on are padding and no candidates; nor is what has a logit of NaN or +inf, as long
        as there are enough others.
    """
    with jax.named_scope("dflash2_selector"):
        unary, ids = lax.top_k(mask_padding(logits, real_vocab_size), count)
        if selector is None:
            return Lattice(ids, jnp.broadcast_to(unary[:, :, None], (*ids.shape, count)))
        first = jnp.broadcast_to(anchor[:, None, None], ids[:, :1].shape)
        before = jnp.concatenate([first, ids[:, :-1]], axis=1)
        row = linear(hidden, selector.projection, jnp.float32)  # [B, D, rank]
        predecessors = embed(selector.predecessors, before).astype(jnp.float32)  # [B, D, C, rank]
        successors = embed(selector.successors, ids).astype(jnp.float32)
        pairs = jnp.einsum("bdir,bdjr->bdij", predecessors * row[:, :, None], successors, precision=PRECISION)
        return Lattice(ids, unary[:, :, None] + pairs)


def walk(lattice: Lattice, sampler: SamplerState, positions: Array, truncate: bool) -> tuple[Array, Array]:
    """Chooses a candidate of each row after the one chosen in the row before.

    Args:
      positions: `[B, D]` int32, the absolute position of each draft.
      truncate: as for `draft_log_q`.

    Returns:
      Indices `[B, D]` int32 of the candidates; `[B, D, C]` fp32, the log-probabilities that each was drawn with.
    """

    def of_row(scores, positions):  # scores [B, C, C]; all predecessors of a row share its noise
        log_q = jax.vmap(lambda scores: draft_log_q(scores, sampler, truncate), 1, 1)(scores)
        return log_q, jax.vmap(lambda log_q: draw_candidate(log_q, sampler, positions), 1, 1)(log_q)

    def step(last, choices):
        chosen = jnp.take_along_axis(choices, last[:, None], axis=1)[:, 0]
        return chosen, chosen

    with jax.named_scope("dflash2_walk"):
        log_q, choices = jax.vmap(of_row, (1, 1), (1, 0))(lattice.scores, positions)  # [B, D, C, C], [D, B, C]
        start = jnp.zeros(positions.shape[0], jnp.int32)
        chosen = lax.scan(step, start, choices, unroll=True)[1].swapaxes(0, 1)
        before = jnp.pad(chosen[:, :-1], ((0, 0), (1, 0)))
        return chosen, jnp.take_along_axis(log_q, before[:, :, None, None], axis=2)[:, :, 0]


def tree_walk(lattice: Lattice, tree: Tree) -> Array:
    """`[B, drafts]` int32 ids of a tree: below every row, the candidates by their scores after the row's own."""
    batch, _, count = lattice.ids.shape
    sequence = jnp.arange(batch)[:, None]
    chosen = jnp.zeros((batch, len(tree.parents)), jnp.int32)  # candidates; the anchor's is any
    with jax.named_scope("dflash2_walk"):
        for depth in range(1, tree.depth + 1):
            rows, parents, ranks = tree.level(depth)
            _, order = lax.top_k(lattice.scores[:, depth - 1], count)  # [B, C after each of C]
            chosen = chosen.at[:, rows].set(order[sequence, chosen[:, parents], ranks])
        return lattice.ids[sequence, tree.depths[1:] - 1, chosen[:, 1:]]
