"""How close do the kernels come to the speed of the memory, at the true shapes of the 27B model?

    python -m experiments.kernel_speed                         every kernel and shape, on one GPU
    python -m experiments.kernel_speed --only int4_matmul_gate_up --rows 8 16

First the result is compared with the reference. Then a loop on the device calls the kernel on one layer after another
of a stack several times the size of the cache, so that weights come from memory as they do in a decode step. Loops of
two lengths are timed; the difference, over that of the lengths, is the time of a call: without what it takes to start a
loop, but with the gaps between kernels and whatever else of a call is left to XLA, such as adding up partial sums. The
floor is what takes longer: the bytes that have to be moved, at the rate at which this card, in this run, reads a large
array, or the operations, at the rate of a large product of bf16 matrices. The column "read" is what adding up as many
bytes takes, from the same kind of stack; "plain" is the same in plain JAX: attention with its pages gathered first, the
recurrence as the model has it.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.harness import Timing, append, measure, new_record, table
from pallas_kernels.cases import Case, all_cases
from pallas_kernels.device import current_device
from pallas_kernels.gated_delta_net_prefill import Prefilled
from qwen38_jax.block import chain_block
from qwen38_jax.layers.gated_delta_net import Inputs, whole_rule

Array = jax.Array

QUESTION = "kernel_speed"
STACK_BYTES = 600_000_000  # several times the cache of any GPU
LOOP_SECONDS = 3e-3  # of the shorter loop
COLUMNS = (
    "kernel",
    "shape",
    "rows",
    "microseconds=us",
    "gigabytes_per_second=GB/s",
    "teraflops=TFLOP/s",
    "fraction=of the floor",
    "read_microseconds=read, us",
    "plain_microseconds=plain, us",
    "relative_rms=error",
)


def plain_prefill(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, layer: Array) -> Prefilled:
    """Gated DeltaNet as the model computes it without kernels."""
    block = chain_block(jnp.zeros(g.shape[:2], jnp.int32), jnp.zeros(g.shape[0], jnp.int32))
    out, *_, state = whole_rule(Inputs(q, k, v, g, beta), state, block)
    return Prefilled(out.astype(q.dtype), state)


PLAIN = {"prefill_gdn": plain_prefill}  # where `Case.plain` would need the model


class WrongResult(Exception):
    """A kernel does not compute what its reference does."""


def read_rate(nbytes: int = 1 << 31) -> float:
    """Bytes per second at which a large array is added up."""
    return nbytes / time_read(nbytes, 1)


def time_read(nbytes: int, layers: int) -> float:
    """Seconds that adding up `nbytes` takes."""
    stack = jnp.ones((layers, nbytes // 4), jnp.int32)
    return time_call(lambda stack, layer: jnp.sum(stack[layer]), (stack,), layers, nbytes / 2e12).median


def dense_rate(n: int = 8192) -> float:
    """Operations per second of a product of large bf16 matrices."""
    a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    timing = time_call(
        lambda a, b, layer: a @ b,
        (a, b * n**-0.5),  # so that products of products stay as large as they are
        1,
        2 * n**3 / 8e14,
        advance=lambda arguments, product: (product, arguments[1]),
    )
    return 2 * n**3 / timing.median


def time_call(
    function: Callable[..., Any],
    arguments: tuple,
    layers: int,
    estimate: float,
    repeats: int = 7,
    advance: Callable[[tuple, Any], tuple] = lambda arguments, result: arguments,
) -> Timing:
    """Seconds that `function(*arguments, layer)` takes on the device.

    Args:
      estimate: roughly the same, to choose the length of a loop.
      advance: see `Case`.
    """
    count, loop = max(2 * layers, int(LOOP_SECONDS / estimate)), repeated(function, layers, advance)
    short, long = (measure(loop, arguments, n, repeats=repeats) for n in (count, 3 * count))
    seconds = (np.array(long.seconds) - short.median) / (2 * count)
    return Timing(tuple(seconds.tolist()))


def repeated(function: Callable[..., Any], layers: int, advance: Callable[[tuple, Any], tuple]) -> Callable[..., Any]:
    """The jitted function of `(arguments, count)` that calls `function` so many times, on one layer after another."""

    def turn(i, arguments):
        result = function(*arguments, lax.rem(i, layers))
        following = advance(arguments, result)
        # Carried once, or a kernel could not overwrite its argument: it would have to be copied at every turn.
        carried = {id(leaf) for leaf in jax.tree.leaves(following)}
        return following, [leaf for leaf in jax.tree.leaves(result) if id(leaf) not in carried]

    @functools.partial(jax.jit, static_argnums=1)
    def loop(arguments, count):
        # A result depends on the turn, so none can be left out; and its length is known, which a loop that asks the
        # host at every turn would take 30 us to find out.
        rest = jax.eval_shape(turn, 0, arguments)[1]
        nothing = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in rest]
        return lax.fori_loop(0, count, lambda i, carry: turn(i, carry[0]), (arguments, nothing))

    return loop


def relative_rms(case: Case, arguments: tuple) -> float:
    """Of the difference between kernel and reference, for the last layer."""
    outputs = [jax.jit(f)(*arguments, jnp.int32(case.layers - 1)) for f in (case.function, case.reference)]
    actual, expected = (
        np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(o)]) for o in outputs
    )
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


def case_record(case: Case, read: float, dense: float, repeats: int) -> dict[str, Any]:
    """What came out for a case, on a card that reads so many bytes and does so many operations per second."""
    arguments = jax.jit(case.make)(jax.random.key(0))
    error = relative_rms(case, arguments)
    if not error <= case.tolerance:
        raise WrongResult(f"relative rms {error:.2e}, allowed {case.tolerance:.0e}")
    floor = max(case.nbytes / read, case.operations / dense)
    timing = time_call(case.function, arguments, case.layers, floor, repeats, case.advance)
    plain, function = None, PLAIN.get(case.kernel, case.plain)
    if function is not None:
        plain = 1e6 * time_call(function, arguments, case.layers, 5 * floor, repeats, case.advance).median
    del arguments
    return new_record(
        QUESTION,
        weights="random",
        settings={"kernel": case.kernel, "shape": case.shape, "rows": case.rows, "layers": case.layers},
        results={
            "call": timing,
            "microseconds": 1e6 * timing.median,
            "gigabytes_per_second": case.nbytes / timing.median / 1e9,
            "teraflops": case.operations / timing.median / 1e12,
            "fraction": floor / timing.median,
            "nbytes": case.nbytes,
            "read_microseconds": 1e6 * time_read(case.nbytes, case.layers),
            "plain_microseconds": plain,
            "read_rate_gigabytes_per_second": read / 1e9,
            "dense_rate_teraflops": dense / 1e12,
            "relative_rms": error,
        },
        repeats=repeats,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="default: all")
    parser.add_argument("--repeats", type=int, default=7, help="of every measurement (%(default)s)")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        sys.exit("error: kernels are timed on a GPU; there is none here")
    cases = all_cases(current_device(), lambda _, nbytes: max(2, -(-STACK_BYTES // nbytes)))
    wanted = [c for c in cases if args.only in c.name and (not args.rows or c.rows in args.rows)]
    if not wanted:
        sys.exit(f"error: no case has {args.only!r} in its name")
    read, dense, records, failed = read_rate(), dense_rate(), [], []
    for case in wanted:
        try:
            records.append(case_record(case, read, dense, args.repeats))
        except Exception as error:  # whatever is wrong with one, the others are worth timing
            failed.append(case.name)
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        append(records[-1])
        print(f"{case.name}: {records[-1]['results']['microseconds']:.1f} us", file=sys.stderr, flush=True)
    print(table(records, COLUMNS))
    if failed:
        sys.exit(f"error: {len(failed)} of {len(wanted)} cases failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
