"""Puts trained draft heads into a copy of a checkpoint, of which nothing else changes.

    python -m scripts.export_checkpoint SRC DST --mtp runs/mtp/mtp.safetensors --drafter runs/dflash2/drafter

SRC is a Hugging Face directory and stays as it is. DST has its files byte for byte, but for the values of the MTP
head's tensors, and, if one is given, the DFlash2 drafter as DST/drafter, in the layout that other engines read as well.
`qwen38 generate --checkpoint DST --speculate mtp` (or dflash2, with --drafter DST/drafter) runs it at once. A draft
vocabulary is cut by prepare_checkpoint --draft-vocab. Prints what was done, as JSON.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwen38_jax.checkpoint.drafter import drafter_account
from qwen38_jax.checkpoint.files import CheckpointError
from qwen38_jax.checkpoint.load import read_config
from qwen38_jax.checkpoint.mtp_file import replace_mtp
from qwen38_jax.checkpoint.write import new_directory

DRAFTER = "drafter"


def export(source: Path, destination: Path, mtp: Path | None, drafter: Path | None) -> dict[str, Any]:
    """Writes the new directory `destination`; raises CheckpointError before that for what does not fit together."""
    if drafter is not None:
        check_drafter(source, drafter)
    done: dict[str, Any] = {"checkpoint": str(destination)}
    with new_directory(destination) as partial:
        whole = partial / "whole"
        if mtp is not None:
            done["mtp"] = replace_mtp(source, whole, mtp)
        else:
            whole.mkdir()
            for path in sorted(source.iterdir()):
                if path.is_file():
                    shutil.copyfile(path, whole / path.name)
        if drafter is not None:
            shutil.copytree(drafter, whole / DRAFTER)
            done["drafter_bytes"] = sum(path.stat().st_size for path in (whole / DRAFTER).iterdir())
        for path in whole.iterdir():
            path.rename(partial / path.name)
        whole.rmdir()
    return done


def check_drafter(source: Path, drafter: Path) -> None:
    """Raises CheckpointError for a drafter that is not whole, or is another model's."""
    ours, (_, _, theirs) = drafter_account(drafter).cfg, read_config(source)
    found = (ours.vocab_size, ours.hidden_size, ours.num_target_layers)
    if found != (theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers):
        raise CheckpointError(
            f"{drafter} is for a model of {found[0]} ids, width {found[1]} and {found[2]} layers, {source} is another"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("destination", type=Path, metavar="DST", help="a new directory")
    parser.add_argument("--mtp", type=Path, metavar="FILE", help="an MTP head, as train_mtp writes it")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash2 drafter, as train_dflash2 writes it")
    args = parser.parse_args(argv)
    if args.mtp is None and args.drafter is None:
        parser.error("nothing to export: name a head with --mtp, or a drafter with --drafter")
    try:
        print(json.dumps(export(args.source, args.destination, args.mtp, args.drafter), indent=2))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
