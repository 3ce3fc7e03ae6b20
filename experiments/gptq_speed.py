"""How long does GPTQ take for one matrix on this machine, and how much memory?

    python -m experiments.gptq_speed                                     # an MLP's down projection of the 27B model
    python -m experiments.gptq_speed --rows 248320 --columns 5120        # its output head

Weights and activations are random, which changes neither.
"""

import argparse
import resource
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.harness import append, measure, new_record, table
from qwen38_jax.quantization.gptq import add_rows, empty_hessian, gptq

QUESTION = "gptq_speed"
COLUMNS = (
    "rows",
    "columns",
    "bits",
    "group",
    "act_order",
    "clip_search",
    "gptq.median_ms=GPTQ, ms",
    "accumulate.median_ms=Hessian, ms",
    "calibration_rows=of rows",
    "peak_gib=peak GiB",
    "peak_of=of",
)


def gptq_record(rows: int, columns: int, calibration_rows: int, repeats: int, **options: Any) -> dict[str, Any]:
    """Time of quantising `[rows, columns]` in bf16, and of accumulating a Hessian from bf16 activations."""
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (rows, columns), jnp.bfloat16)
    x = jax.random.normal(keys[1], (calibration_rows, columns), jnp.bfloat16)
    accumulate = measure(lambda: add_rows(empty_hessian(columns), x), warmup=1, repeats=repeats)
    hessian = add_rows(empty_hessian(columns), x).matrix
    reports = []

    def quantise():
        quantised, report = gptq(w, hessian, **options)
        reports.append(report)
        return quantised

    timing = measure(quantise, warmup=1, repeats=repeats)
    peak, of = _peak_bytes()
    return new_record(
        QUESTION,
        weights="random",
        settings={"rows": rows, "columns": columns, "calibration_rows": calibration_rows, **options},
        results={
            "gptq": timing,
            "accumulate": accumulate,
            "output_error": reports[-1].output_error,
            "peak_gib": peak / 2**30,
            "peak_of": of,
        },
        repeats=repeats,
    )


def _peak_bytes() -> tuple[int, str]:
    """The most that was in use, of the device's memory where it tells, or else of the process's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "device memory"
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "process"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5120, metavar="N", help="default: %(default)s")
    parser.add_argument("--columns", type=int, default=17408, metavar="K", help="default: %(default)s")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="default: %(default)s")
    parser.add_argument("--group", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument("--clip-search", action="store_true")
    parser.add_argument("--calibration-rows", type=int, default=4096, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every measurement (%(default)s)")
    args = parser.parse_args(argv)
    options = {name: getattr(args, name) for name in ("bits", "group", "act_order", "clip_search")}
    record = gptq_record(args.rows, args.columns, args.calibration_rows, args.repeats, **options)
    append(record)
    print(table([record], COLUMNS))


if __name__ == "__main__":
    main()
