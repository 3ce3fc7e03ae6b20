"""Trains a DFlash2 drafter on captured layer outputs of its model, which stays as it is.

    python -m scripts.train_dflash2 states/ runs/dflash2 --checkpoint DIR --steps 5000 --anchors 64

The run directory gets log.jsonl, settings.json and, whenever training stops, drafter/: config.json and
model.safetensors in the layout of published drafters, which `qwen38 generate --drafter` loads. A run that is stopped or
killed goes on when the same command is given again.
"""

import argparse
import dataclasses
import functools
import shutil
from collections.abc import Sequence
from typing import Any

import jax

from qwen38_jax.checkpoint import export_drafter, load_checkpoint
from qwen38_jax.checkpoint.files import weights_hash
from qwen38_jax.config import ModelConfig
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab import runs
from qwen38_jax.lab.dflash2 import WEIGHTINGS, DFlash2Loss, default_config, dflash2_loss
from qwen38_jax.lab.mtp import frozen_parts
from qwen38_jax.params import abstract_dflash2, init_tree

# Flags that are fields of DFlash2Loss.
_LOSS = ("weighting", "gamma", "alpha", "selector_weight", "inject_gold", "selector_to_blocks", "blocks_at_once")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, and writes the drafter reached."""
    directory = args.checkpoint or SHIPPED_CHECKPOINT
    identity = weights_hash(directory)
    captured = runs.open_states(args.states, identity)
    checkpoint = load_checkpoint(directory, dtype=args.dtype)
    real_vocab_size = captured.manifest["real_vocab_size"]
    cfg = default_config(
        checkpoint.cfg,
        tap_layers=captured.tap_layers,
        mask_token_id=real_vocab_size - 1 if args.mask_token is None else args.mask_token,
        layers=args.layers,
        intermediate=args.intermediate or checkpoint.cfg.intermediate_size,
        selector_rank=args.selector_rank,
        block_size=args.block_size,
        window=args.window,
    )
    runs.keep_settings(args.run, runs.settings_of(args, model=identity, states=captured.manifest["outputs"]))
    infos = abstract_dflash2(dataclasses.replace(cfg, dtype="float32"))
    loss = functools.partial(
        dflash2_loss,
        cfg=cfg,
        settings=DFlash2Loss(**{name: getattr(args, name) for name in _LOSS}),
        real_vocab_size=real_vocab_size,
    )
    init = functools.partial(init_tree, infos, jax.random.key(args.seed))
    fields = ("tokens", "response", "taps")
    state = runs.train(args, loss, init, infos, frozen_parts(checkpoint.params), captured, fields, anchors=args.anchors)
    stored = dataclasses.replace(cfg, dtype=ModelConfig.from_hf(checkpoint.hf_config).dtype)
    drafter = args.run / "drafter"
    shutil.rmtree(drafter, ignore_errors=True)  # of an earlier stretch
    export_drafter(drafter, jax.tree.map(lambda p: p.astype(stored.dtype), state.params), stored)
    size = sum(path.stat().st_size for path in drafter.iterdir())
    return {"step": int(state.step), "steps": args.steps, "drafter": str(drafter), "bytes": size}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs.add_flags(parser, steps=2000, rate=2e-3)
    add, loss = parser.add_argument, DFlash2Loss()
    add("--layers", type=int, default=4, metavar="N", help="%(default)s")
    add("--intermediate", type=int, metavar="N", help="width of the MLPs (default: the model's)")
    add("--block-size", type=int, default=8, metavar="N", help="the anchor and the drafts (%(default)s)")
    add("--window", type=int, default=2048, metavar="N", help="rows of the text that a block sees (%(default)s)")
    add("--selector-rank", type=int, default=32, metavar="N", help="%(default)s")
    add("--mask-token", type=int, metavar="ID", help="default: the tokenizer's last, which no text has")
    add("--anchors", type=int, default=64, metavar="N", help="blocks in each piece of a text (%(default)s)")
    add("--blocks-at-once", type=int, default=loss.blocks_at_once, metavar="N", help="of these (%(default)s)")
    add("--weighting", choices=WEIGHTINGS, default=loss.weighting, help="of places in a block (%(default)s)")
    add("--gamma", type=float, default=loss.gamma, metavar="X", help="of decay (%(default)s)")
    add("--alpha", type=float, default=loss.alpha, metavar="X", help="of d-pace (%(default)s)")
    add("--selector-weight", type=float, default=loss.selector_weight, metavar="X", help="%(default)s")
    add("--inject-gold", action=argparse.BooleanOptionalAction, default=True, help="the right token as a candidate")
    add("--selector-to-blocks", action=argparse.BooleanOptionalAction, default=True, help="train them with its loss")
    runs.report(run, parser.parse_args(argv))


if __name__ == "__main__":
    main()
