"""A block of rows that one call of the model processes: a prefill chunk, a decode row, drafts to verify."""

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array


@struct.dataclass
class Block:
    """Rows of a batch of sequences.

    tokens: `[B, L]` int32 ids.
    positions: `[B, L]` int32 absolute positions; a committed row is kept in the cache under its position.
    valid: `[B, L]` bool; the other rows are padding, on either side, and leave no trace in state or results.
    parents: None for a chain, where each valid row follows the one before it. Else `[B, L]` int32, the row that each
      row of a tree of drafts follows, -1 for one that follows the committed text. Parents come before children.
    """

    tokens: Array
    positions: Array
    valid: Array
    parents: Array | None = None


def chain_block(tokens: Array, lengths: Array, valid: Array | None = None) -> Block:
    """The block that appends the valid `tokens [B, L]` to sequences of `lengths [B]` tokens."""
    valid = jnp.ones(tokens.shape, bool) if valid is None else valid
    positions = lengths[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    return Block(tokens, jnp.where(valid, positions, 0), valid)


def visible(block: Block) -> Array:
    """`[B, L, L]` bool: row i may read row j, which is j itself or a valid ancestor of i."""
    return ancestors(block) & block.valid[:, None, :]


def ancestors(block: Block) -> Array:
    """`[B, L, L]` bool: row j lies on the path from the committed text to row i, i included."""
    batch, n = block.tokens.shape
    if block.parents is None:
        return jnp.broadcast_to(jnp.tri(n, dtype=bool), (batch, n, n))
    rows = jnp.arange(n)
    reach = (rows[:, None] == rows) | (block.parents[..., None] == rows)
    for _ in range(max(n - 1, 1).bit_length()):  # every squaring doubles the length of the paths covered
        reach = jnp.einsum("bij,bjk->bik", reach.astype(jnp.float32), reach.astype(jnp.float32)) > 0
    return reach
