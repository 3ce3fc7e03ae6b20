"""The schedule of the matmuls with few rows, and what they share: reading activations, writing partial sums.

A matrix is a grid of units: `blocks` of 64 output channels by `steps` along K. Each of P programs, as many as run at
once, takes P-th part of the units in a row, which is a whole number of blocks only by chance:

    block     0           1           2           3
    unit   |0 1 2 3 4 5|6 7 8 . . .| . . . . . .| . . . . . .|
    program|0 0 0 0 1 1|1 1 2 2 2 2|3 3 3 3 4 4|4 4 5 5 5 5|

So all finish together whatever the shape, where a grid of whole blocks leaves most processors idle during its last
wave, and loads for the next unit are on their way while one is multiplied, across the end of a block too. A block that
is shared leaves several partial sums. They go to slots, `[slots, M, N]`, and are added by whatever reads the result:
deterministic, unlike atomic additions, and the addition fuses with the cast, the residual, the activation after it.
(Osama et al., "Stream-K", 2023, with a second pass in place of its fix-up.)
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Array = jax.Array

BLOCK = 64  # output channels of a unit: four tiles of an A operand
TILES = BLOCK // 16
TOKENS = 8  # of one B operand
MAX_ROWS = 32  # more accumulators than these have no room in the registers


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which program multiplies which units."""

    blocks: int
    steps: int
    programs: int

    @property
    def units(self) -> int:
        return self.blocks * self.steps

    def first_unit(self, program: Array | int) -> Array | int:
        return floordiv(program * self.units, self.programs)

    def program_of(self, unit: Array | int) -> Array | int:
        """The inverse: the last program whose first unit is not after `unit`."""
        return floordiv((unit + 1) * self.programs - 1, self.units)

    @property
    def slots(self) -> int:
        """The most programs that share a block."""
        ends = ((b * self.steps, (b + 1) * self.steps - 1) for b in range(self.blocks))
        return max(self.program_of(last) - self.program_of(first) + 1 for first, last in ends)


def schedule(blocks: int, steps: int, programs: int) -> Schedule:
    """A `Schedule` of at most `programs` programs.

    Raises:
      ValueError: the matrix is so large that the schedule's arithmetic would overflow.
    """
    programs = min(programs, blocks * steps)
    if (blocks * steps + 1) * programs >= 2**31:
        raise ValueError(f"{blocks} x {steps} units on {programs} programs overflow 32 bits; split the matrix")
    return Schedule(blocks, steps, programs)


Loaded = tuple[Array, ...]


def stream_k(
    plan: Schedule,
    load: Callable[[Array, Array], Loaded],
    multiply: Callable[[Array, Loaded, Loaded], Loaded],
    store: Callable[[Array, Array, Array, Loaded], None],
    zeros: Loaded,
) -> None:
    """What one program does.

    Args:
      load: (block, step) -> what is read for a unit while the one before is multiplied.
      multiply: (step, what was loaded, totals) -> totals.
      store: (block, slot, whether it is the block's last, totals).
      zeros: totals to begin with.
    """
    program = pl.program_id(0)
    begin, end = plan.first_unit(program), plan.first_unit(program + 1)

    def position(unit):
        block = floordiv(unit, plan.steps)
        return block, unit - block * plan.steps

    def body(unit, carry):
        loaded, totals = carry
        following = load(*position(jnp.minimum(unit + 1, end - 1)))
        block, step = position(unit)
        totals = multiply(step, loaded, totals)
        block_ends = step == plan.steps - 1

        def flush(*totals):
            store(block, program - plan.program_of(block * plan.steps), block_ends, totals)
            return zeros

        totals = lax.cond(block_ends | (unit == end - 1), flush, lambda *totals: totals, *totals)
        return following, totals

    lax.fori_loop(begin, end, body, (load(*position(begin)), zeros))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of activations: `[count, words]` of 32-bit words, at most `MAX_ROWS`."""

    count: int
    words: int

    @property
    def tiles(self) -> int:
        """B operands that they are."""
        return -(-self.count // TOKENS)

    def load(self, ref, tile: int, word: Array) -> Array:
        """For lane (g, t) the four words from `word + 4 t` on of row g of a tile; zero where there is no row.

        word: int32 `[warps, 128]`, multiples of 4, the same for all lanes of a warp.
        """
        column = lane_words(word.shape[0])[1]
        row = floordiv(column, 16) + TOKENS * tile
        place = ref.at[row * self.words + (word + remainder(column, 16))]
        if TOKENS * (tile + 1) > self.count:
            return triton.load(place, mask=row < self.count, other=0)
        return triton.load(place)


def store_tiles(out_ref, plan: Schedule, rows: Rows, block: Array, slot: Array, last: Array, totals: Loaded) -> None:
    """Adds up what the warps of a program have for the same outputs, and writes it to a slot.

    Whoever ends a block also clears the slots that no program uses there.

    Args:
      out_ref: `[slots * rows * channels]`.
      totals: C tiles `[warps, 128]`, `rows.tiles` for each of the block's `TILES`.
    """
    # Triton joins two arrays at a time, along a new last axis, so a power of two of them; and sums are cheapest if all
    # tiles meet in one array.
    count = 1 << (len(totals) - 1).bit_length()
    joined = [*totals, *[jnp.zeros_like(totals[0])] * (count - len(totals))]
    while len(joined) > 1:
        half = len(joined) // 2
        joined = [jnp.stack([joined[i], joined[i + half]], axis=-1) for i in range(half)]
    value = jnp.sum(joined[0].reshape(-1, 128 * count), axis=0)

    index = lax.iota(jnp.int32, 128 * count)
    tile, word = remainder(index, count), floordiv(index, count)
    lane, word = floordiv(word, 4), remainder(word, 4)
    tile_row, token_tile = floordiv(tile, rows.tiles), remainder(tile, rows.tiles)
    channel = block * BLOCK + tile_row * 16 + floordiv(lane, 4) + 8 * floordiv(word, 2)
    token = token_tile * TOKENS + 2 * remainder(lane, 4) + remainder(word, 2)
    mask = (token < rows.count) & (tile < len(totals))

    channels = plan.blocks * BLOCK
    triton.store(out_ref.at[(slot * rows.count + token) * channels + channel], value, mask=mask)
    for unused in range(1, plan.slots):
        clear = mask & last & (slot < unused)
        triton.store(out_ref.at[(unused * rows.count + token) * channels + channel], jnp.zeros_like(value), mask=clear)


def lane_words(warps: int) -> tuple[Array, Array]:
    """For each word of an array `[warps, 128]` its warp, and its place among the warp's 128 words."""
    return tuple(lax.broadcasted_iota(jnp.int32, (warps, 128), axis) for axis in (0, 1))


def sum_slots(partial: Array) -> Array:
    """`[slots, M, N]` -> `[M, N]`."""
    return jnp.sum(partial, axis=0)


# Triton follows divisibility and contiguity of addresses, which make wide loads, through its division and remainder;
# through shifts and masks, to which a division by a power of two might be turned before it sees it, it does not.


def floordiv(a: Array | int, b: int) -> Array | int:
    """For numbers that are not negative."""
    return a // b if isinstance(a, int) else lax.div(a, jnp.full_like(a, b))


def remainder(a: Array | int, b: int) -> Array | int:
    return a % b if isinstance(a, int) else lax.rem(a, jnp.full_like(a, b))
