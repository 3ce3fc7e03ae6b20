"""When a verify block is long: each sequence decides by its own past, whatever its neighbours do."""

import jax
import jax.numpy as jnp
from flax import struct

from qwen38_jax.spec_config import SpecConfig

Array = jax.Array


@struct.dataclass
class BlockLength:
    """Decision for the coming step and what it will be made from, each `[B]`.

    long: bool, the coming block is long. reason, reason_before: bool, whether the last step and the one before it
    spoke for long blocks. sticky: int32, long blocks that may still follow without a reason.
    """

    long: Array
    reason: Array
    reason_before: Array
    sticky: Array


def first_block(batch: int, spec: SpecConfig, drafts: int) -> BlockLength:
    """Before any step. `drafts`: D, what the drafter itself provides."""
    long = jnp.full(batch, always_long(spec, drafts) or spec.cheap_context > 0)
    # Buffers of their own each, so that they can be donated.
    return BlockLength(long, jnp.zeros(batch, bool), jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32))


def next_block(state: BlockLength, reason: Array, tokens: Array, spec: SpecConfig, drafts: int) -> BlockLength:
    """The state after a step that gave `reason [B]` for long blocks and left sequences of `tokens [B]`.

    A long block follows two steps in a row with a reason, and then `spec.sticky` more. The last step's own reason does
    not count yet, so that a host may choose the next program before that step has finished.
    """
    entered = state.reason & state.reason_before
    coasts = ~entered & (state.sticky > 0)
    long = entered | coasts | (tokens < spec.cheap_context) | always_long(spec, drafts)
    return BlockLength(
        long=long,
        reason=reason,
        reason_before=state.reason,
        sticky=jnp.where(entered, spec.sticky, jnp.where(coasts, state.sticky - 1, 0)),
    )


def step_reason(has_tail: Array, emitted: Array, long: Array, spec: SpecConfig, drafts: int) -> Array:
    """`[B]` bool: a lookup reached behind the drafter's tokens, and the step emitted enough."""
    short_need, long_need = (need or drafts + 1 for need in (spec.saturation, spec.long_saturation))
    return has_tail & (emitted >= jnp.where(long, long_need, short_need))


def always_long(spec: SpecConfig, drafts: int) -> bool:
    """Without drafts of its own a drafter has no short block, one of k drafts no long one, and a tree one shape."""
    return spec.tree is not None or not spec.adaptive or not 0 < drafts < spec.verify_tokens
