"""Makes a checkpoint ready for one card, in one run that may be interrupted and started again.

    python scripts/prepare_checkpoint.py SRC DST --head int4 --embedding int8 --mtp int4 \\
        --drafter DFLASH2_DIR --drafter-linears int4 --draft-vocab ids.json

SRC is a Hugging Face directory in any format that is read here, or one that this script has made; it is not changed.
DST is a directory that `qwen38 generate --checkpoint DST` loads without conversion: matrices that share an input are
fused, integers are in the layout that kernels read. DST/manifest.json says what was done to which tensor, and how far
the result is from the source.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qwen38_jax.checkpoint.prepare import CHOICES, GROUP, Options, plan_preparation
from qwen38_jax.quantization import LAYOUTS


def summary(manifest: dict[str, Any]) -> str:
    """What was done, for a terminal: kinds of change, how many tensors, and their round-trip errors."""
    changes: dict[tuple[str, str], list[float]] = {}
    for record in manifest["tensors"].values():
        changes.setdefault((record["was"], record["is"]), []).append(record["relative_rms_error"])
    rows = [("tensors", "was", "is", "error, median", "error, largest")]
    rows += [
        (str(len(errors)), was, now, f"{statistics.median(errors):.2e}", f"{max(errors):.2e}")
        for (was, now), errors in changes.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("destination", metavar="DST", type=Path, help="a new or empty directory")
    floats = "int8 for what the source has in floats"
    parser.add_argument("--head", choices=CHOICES, help=f"output head, and draft head (default: {floats})")
    parser.add_argument("--embedding", choices=("int8", "keep"), help=f"default: {floats}")
    parser.add_argument("--mtp", choices=CHOICES, help=f"linears of the MTP head (default: {floats})")
    parser.add_argument("--body", choices=CHOICES, default="keep", help="linears of the layers (default: keep)")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter, to become DST/drafter")
    parser.add_argument("--drafter-linears", choices=CHOICES, help=f"its linears (default: {floats})")
    parser.add_argument(
        "--draft-vocab", type=Path, metavar="FILE", help="token ids, a JSON list or .pt: cut a draft head to these"
    )
    parser.add_argument(
        "--layout",
        choices=tuple(LAYOUTS),
        help="of integers (default: mma, which kernels read, where that can hold them)",
    )
    parser.epilog = f"Integers are rounded to the nearest, in groups of {GROUP} columns where that divides a row."
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    fields = {key: value for key, value in vars(args).items() if key not in ("source", "destination")}
    try:
        plan = plan_preparation(args.source, Options(**fields))
        with tqdm(total=plan.nbytes, unit="B", unit_scale=True) as progress:
            manifest = plan.run(args.destination, progress.update)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on from here") from None
    print(summary(manifest))


if __name__ == "__main__":
    main()
