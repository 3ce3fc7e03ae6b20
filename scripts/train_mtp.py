"""Trains an MTP head on captured hidden states of its model, which stays as it is.

    python -m scripts.train_mtp states/ runs/mtp --checkpoint DIR --steps 2000 --depth-weights 1 0.5 0.25

The head starts as the checkpoint's own, or from nothing. `--loss kl` learns the model's distribution instead of the
text's tokens; `--draft-vocab` takes both over some tokens only. The run directory gets log.jsonl, settings.json and,
whenever training stops, mtp.safetensors, which `export_checkpoint` puts into a copy of the checkpoint. A run that is
stopped or killed goes on when the same command is given again.
"""

import argparse
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.checkpoint.draft_ids import read_vocabulary
from qwen38_jax.checkpoint.files import weights_hash
from qwen38_jax.checkpoint.mtp_file import write_mtp
from qwen38_jax.config import ModelConfig
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab import runs
from qwen38_jax.lab.mtp import LOSSES, MtpLoss, frozen_parts, mtp_loss
from qwen38_jax.params import abstract, init_tree


def run(args: argparse.Namespace) -> dict:
    """Trains, and writes the head reached."""
    directory = args.checkpoint or SHIPPED_CHECKPOINT
    identity = weights_hash(directory)
    captured = runs.open_states(args.states, identity)
    checkpoint = load_checkpoint(directory, dtype=args.dtype)
    cfg = dataclasses.replace(checkpoint.cfg, mtp_num_hidden_layers=1)
    vocabulary = None if args.draft_vocab is None else read_vocabulary(args.draft_vocab, cfg.vocab_size)
    runs.keep_settings(
        args.run,
        runs.settings_of(
            args,
            model=identity,
            states=captured.manifest["outputs"],
            draft_vocab=None if vocabulary is None else hashlib.sha256(vocabulary.tobytes()).hexdigest(),
        ),
    )
    infos = abstract(dataclasses.replace(cfg, dtype="float32")).mtp
    if args.from_scratch or checkpoint.params.mtp is None:
        init = functools.partial(init_tree, infos, jax.random.key(args.seed))
    else:
        init = lambda: jax.tree.map(lambda p: jnp.array(p, jnp.float32), checkpoint.params.mtp)  # noqa: E731
    loss = functools.partial(
        mtp_loss,
        cfg=cfg,
        settings=MtpLoss(args.loss, tuple(args.depth_weights)),
        vocabulary=None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32),
    )
    fields = ("tokens", "hidden", "response")
    state = runs.train(args, loss, init, infos, frozen_parts(checkpoint.params), captured, fields)
    stored = dataclasses.replace(cfg, dtype=ModelConfig.from_hf(checkpoint.hf_config).dtype)
    write_mtp(args.run / "mtp.safetensors", state.params, stored)
    return {"step": int(state.step), "steps": args.steps, "head": str(args.run / "mtp.safetensors")}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs.add_flags(parser, steps=1000, rate=1e-3)
    parser.add_argument("--from-scratch", action="store_true", help="do not start from the checkpoint's head")
    parser.add_argument("--loss", choices=LOSSES, default="ce", help="%(default)s")
    parser.add_argument("--depth-weights", type=float, nargs="+", default=[1.0, 0.7, 0.5, 0.35], metavar="W")
    parser.add_argument("--draft-vocab", type=Path, metavar="FILE", help="ids that the head may draft, JSON or .pt")
    runs.report(run, parser.parse_args(argv))


if __name__ == "__main__":
    main()
