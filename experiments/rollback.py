"""What does it cost to take rejected drafts back out of a recurrent state?

    python -m experiments.rollback --layers 4
    python -m experiments.rollback --like qwen3.8-27b        (all 48 layers: a GPU, or patience)

A verify block writes every row's update into the state of each Gated DeltaNet layer, but how many rows stay is known
only after the last layer. Three ways to have the right state then, timed on random inputs, without the rest of a model:

* slots: the block is run row by row, and the state after each row is kept; the next step starts from the right one.
* masked: the block leaves the state alone; when the number is known, a second pass applies the rows that stay.
* deferred: as masked, but they are applied by the next block, which reads and writes the state anyway. This is the way
  the model does it.

All three are checked to give the same outputs before they are timed.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.harness import append, measure_chain, new_record, table
from qwen38_jax.block import Block, chain_block
from qwen38_jax.checkpoint import synthetic
from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.gated_delta_net import Inputs, Writes, delta_rule, keep_rows, recurrent_delta_rule
from qwen38_jax.params import tree_bytes

QUESTION = "rollback"
COLUMNS = (
    "way",
    "rows",
    "slot_mb=MB a slot",
    "moved_mb=MB moved a slot and step",
    "ms_per_step=ms",
    "gb_per_second=GB/s",
)

Array = jax.Array


class Sizes(NamedTuple):
    layers: int
    batch: int
    rows: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def sizes_of(cfg: ModelConfig, layers: int | None, batch: int, rows: int) -> Sizes:
    """Those of a model's linear layers, or of the first so many."""
    return Sizes(
        cfg.num_linear_layers if layers is None else layers,
        batch,
        rows,
        cfg.linear_num_key_heads,
        cfg.linear_num_value_heads,
        cfg.linear_key_head_dim,
        cfg.linear_value_head_dim,
    )


def random_inputs(s: Sizes, key: Array) -> Inputs:
    """A block's inputs of all layers, every leaf `[layers, B, rows, ...]`: unit keys, decays of about 0.9."""
    keys = jax.random.split(key, 5)
    shape = (s.layers, s.batch, s.rows)

    def unit(key, heads):
        t = jax.random.normal(key, (*shape, heads, s.key_dim))
        return t / jnp.linalg.norm(t, axis=-1, keepdims=True)

    return Inputs(
        q=unit(keys[0], s.key_heads) * s.key_dim**-0.5,
        k=unit(keys[1], s.key_heads),
        v=jax.random.normal(keys[2], (*shape, s.value_heads, s.value_dim)),
        g=-0.2 * jax.random.uniform(keys[3], (*shape, s.value_heads)),
        beta=jax.random.uniform(keys[4], (*shape, s.value_heads)),
    )


@dataclasses.dataclass(frozen=True)
class Way:
    """`start(sizes)` makes the memory; `step(memory, inputs, before, after)` runs a block.

    `before` and `after`, each `[B]`, are the rows that stay of the last block and of this one, of which every way reads
    one. The step, compiled, uses its memory up and returns the outputs `[layers, B, rows, value_heads, Dv]` and new
    memory. `moved(sizes)`: bytes of state and updates that a step must read or write, for one slot.
    """

    start: Callable[[Sizes], Any]
    step: Callable[[Any, Inputs, Array, Array], tuple[Array, Any]]
    moved: Callable[[Sizes], int]


def state_shape(s: Sizes) -> tuple[int, ...]:
    return (s.layers, s.batch, s.value_heads, s.key_dim, s.value_dim)


def empty_writes(s: Sizes) -> Writes:
    """Of all layers. The convolution's inputs are left out: every way keeps as many."""
    shape = (s.layers, s.batch, s.rows)
    return Writes(
        key=jnp.zeros((*shape, s.key_heads, s.key_dim)),
        delta=jnp.zeros((*shape, s.value_heads, s.value_dim)),
        log_decay=jnp.zeros((*shape, s.value_heads)),
        columns=jnp.zeros((*shape, 0)),
    )


def _at(tree: Any, i: Array) -> Any:
    return jax.tree.map(lambda t: t[i], tree)


def _put(tree: Any, i: Array, values: Any) -> Any:
    return jax.tree.map(lambda t, v: t.at[i].set(v), tree, values)


def _outputs(inputs: Inputs) -> Array:
    return jnp.zeros_like(inputs.v)


def _chain(inputs: Inputs) -> Block:
    batch, rows = inputs.g.shape[1:3]
    return chain_block(jnp.zeros((batch, rows), jnp.int32), jnp.zeros(batch, jnp.int32))


def _path(kept: Array, rows: int) -> Array:
    return jnp.arange(rows) < kept[:, None]


def _verify(inputs: Inputs, state: Array, block: Block) -> tuple[Array, Writes]:
    """One layer's outputs and what its rows would write; the state stays as it is."""
    out, delta, log_decay, _ = delta_rule(inputs, state, block)
    return out, Writes(inputs.k, delta, log_decay, jnp.zeros((*log_decay.shape[:2], 0)))


def slots_step(states: Array, inputs: Inputs, before: Array, after: Array) -> tuple[Array, Array]:
    """states: `[layers, B, rows, value_heads, Dk, Dv]`, those after each row of the last block."""

    def row(state, row):
        out, state = recurrent_delta_rule(Inputs(*(t[:, None] for t in row)), state)
        return state, (out[:, 0], state)

    def layer(i, carry):
        out, states = carry
        first = jnp.take_along_axis(states[i], (before - 1)[:, None, None, None, None], axis=1)[:, 0]
        rows = jax.tree.map(lambda t: t.swapaxes(0, 1), _at(inputs, i))
        _, (o, s) = lax.scan(row, first, rows)
        return out.at[i].set(o.swapaxes(0, 1)), states.at[i].set(s.swapaxes(0, 1))

    return lax.fori_loop(0, len(states), layer, (_outputs(inputs), states))


def masked_step(memory: tuple[Array, Writes], inputs: Inputs, before: Array, after: Array):
    """memory: the state `[layers, B, value_heads, Dk, Dv]` and room for the updates of a block."""
    block, path = _chain(inputs), _path(after, inputs.g.shape[2])

    def verify(i, carry):
        out, state, writes = carry
        o, w = _verify(_at(inputs, i), state[i], block)
        return out.at[i].set(o), state, _put(writes, i, w)

    def commit(i, state):
        return state.at[i].set(keep_rows(state[i], _at(writes, i), path))

    state, writes = memory
    out, state, writes = lax.fori_loop(0, len(state), verify, (_outputs(inputs), state, writes))
    return out, (lax.fori_loop(0, len(state), commit, state), writes)


def deferred_step(memory: tuple[Array, Writes], inputs: Inputs, before: Array, after: Array):
    """memory: as for `masked_step`; the updates are those of the last block."""
    block, path = _chain(inputs), _path(before, inputs.g.shape[2])

    def layer(i, carry):
        out, state, writes = carry
        settled = keep_rows(state[i], _at(writes, i), path)
        o, w = _verify(_at(inputs, i), settled, block)
        return out.at[i].set(o), state.at[i].set(settled), _put(writes, i, w)

    out, *memory = lax.fori_loop(0, len(memory[0]), layer, (_outputs(inputs), *memory))
    return out, tuple(memory)


def _slots(s: Sizes) -> Array:
    layers, batch, *matrix = state_shape(s)
    return jnp.zeros((layers, batch, s.rows, *matrix))


def _state_and_writes(s: Sizes) -> tuple[Array, Writes]:
    return jnp.zeros(state_shape(s)), empty_writes(s)


def _state_bytes(s: Sizes) -> int:
    return 4 * int(np.prod(state_shape(s))) // s.batch


def _write_bytes(s: Sizes) -> int:
    return tree_bytes(jax.eval_shape(functools.partial(empty_writes, s))) // s.batch


_jit = functools.partial(jax.jit, donate_argnums=0)
WAYS = {
    "slots": Way(_slots, _jit(slots_step), lambda s: (1 + s.rows) * _state_bytes(s)),
    "masked": Way(_state_and_writes, _jit(masked_step), lambda s: 3 * _state_bytes(s) + 2 * _write_bytes(s)),
    "deferred": Way(_state_and_writes, _jit(deferred_step), lambda s: 2 * _state_bytes(s) + 2 * _write_bytes(s)),
}


def check(s: Sizes) -> float:
    """The largest difference of the three ways' outputs over some blocks; ValueError where it is no rounding."""
    kept = [jnp.full(s.batch, n, jnp.int32) for n in (1, s.rows, max(s.rows // 2, 1), 1)]
    outputs = []
    for way in WAYS.values():
        memory = way.start(s)
        outputs.append([])
        for i, (before, after) in enumerate(itertools.pairwise(kept)):
            out, memory = way.step(memory, random_inputs(s, jax.random.key(i)), before, after)
            outputs[-1].append(np.asarray(out))
    difference = max(
        float(np.abs(a - b).max()) for other in outputs[1:] for a, b in zip(outputs[0], other, strict=True)
    )
    if not difference < 1e-4:
        raise ValueError(f"the ways differ by {difference}")
    return difference


def record(
    name: str, s: Sizes, difference: float, settings: dict[str, Any], steps: int, repeats: int
) -> dict[str, Any]:
    """Times one way, its memory donated from step to step."""
    way, inputs, kept = WAYS[name], random_inputs(s, jax.random.key(0)), jnp.full(s.batch, (s.rows + 1) // 2, jnp.int32)
    timing, _ = measure_chain(
        lambda memory: way.step(memory, inputs, kept, kept)[1], way.start(s), steps=steps, repeats=repeats
    )
    moved = way.moved(s)
    return new_record(
        QUESTION,
        weights="random",
        settings={"way": name, **s._asdict(), **settings},
        results={
            "slot_mb": tree_bytes(jax.eval_shape(functools.partial(way.start, s))) / s.batch / 1e6,
            "moved_mb": moved / 1e6,
            "gb_per_second": moved * s.batch / timing.median / 1e9,
            "largest_difference": difference,
        },
        seconds_per_step=timing,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", choices=synthetic.MODELS, default="qwen3.8-27b", help="whose widths (%(default)s)")
    parser.add_argument("--layers", type=int, metavar="N", help="of its linear layers (default: all)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="slots (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 5, 8, 16], metavar="N", help="of a block (2 5 8 16)")
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="between two looks at the clock (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="(%(default)s)")
    args = parser.parse_args(argv)
    cfg = synthetic.recipe(args.like).cfg
    records = []
    for rows in args.rows:
        s = sizes_of(cfg, args.layers, args.batch, rows)
        difference = check(s)
        for name in WAYS:
            records.append(record(name, s, difference, {"like": args.like}, args.steps, args.repeats))
            append(records[-1])
    print(table(records, COLUMNS))


if __name__ == "__main__":
    main()
