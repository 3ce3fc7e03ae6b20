"""Which synthetic checkpoints there are, and writing one."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from qwen38_jax.checkpoint.accounting import Account, take_account
from qwen38_jax.checkpoint.draft_ids import DRAFT_IDS, write_draft_ids
from qwen38_jax.checkpoint.drafter import DrafterAccount, take_drafter_account
from qwen38_jax.checkpoint.files import INDEX, Inventory, TensorInfo
from qwen38_jax.checkpoint.synthetic import dflash2, model
from qwen38_jax.checkpoint.synthetic.dflash2 import DrafterRecipe
from qwen38_jax.checkpoint.synthetic.model import Recipe
from qwen38_jax.checkpoint.write import CODES, NewTensor, copy_tokenizer, new_directory, write_json, write_shards
from qwen38_jax.config import ModelConfig

MODELS = ("qwen3.8-27b", *(f"qwen3.8-27b-{name}" for name in model.FORMATS[1:]), "tiny")
DRAFTERS = ("qwen3.8-27b-dflash2", "qwen3.8-27b-dflash2-w4a16")
LIKE = MODELS + DRAFTERS
SCALES = ("full", "small")


def recipe(
    like: str,
    *,
    scale: str | None = None,
    layers: int | None = None,
    vocab: int | None = None,
    vision: bool = True,
    target: ModelConfig | None = None,
) -> Recipe | DrafterRecipe:
    """The recipe for one of `LIKE`; `scale` is `full` unless said otherwise (`tiny` is always small).

    Args:
      target: the model that a drafter is to fit, whatever its scale; None for the one of the same scale.

    Raises:
      ValueError: an unknown name or scale, or sizes that make no model; a target for what is no drafter.
    """
    scale = scale or ("small" if like == "tiny" else "full")
    if like not in LIKE or scale not in SCALES or (like, scale) == ("tiny", "full"):
        raise ValueError(
            f"no synthetic checkpoint like {like!r} at scale {scale!r}; known: {LIKE}, {SCALES}, tiny only small"
        )
    if target is not None and (like not in DRAFTERS or vocab is not None):
        raise ValueError(f"a target says which vocabulary a drafter has, and {like} has no use for one besides")
    small, changes = scale == "small", {"num_hidden_layers": layers, "vocab_size": vocab}
    stored = like.removeprefix("qwen3.8-27b").removeprefix("-") or "bf16"
    if like in DRAFTERS:
        cfg = dflash2.SMALL if small else dflash2.FULL
        if target is not None:
            vocab = target.vocab_size
            changes |= {"hidden_size": target.hidden_size, "num_target_layers": target.num_hidden_layers}
        changes |= {"vocab_size": vocab, "mask_token_id": vocab and min(cfg.mask_token_id, vocab - 1)}
        return DrafterRecipe(_changed(cfg, changes), stored.removeprefix("dflash2").removeprefix("-") or "bf16")
    cfg = model.SMALL if small else model.FULL
    if vocab is not None and vocab < model.FULL.vocab_size:
        changes["eos_token_ids"] = (0,)
    if like == "tiny":
        cfg = _changed(cfg, {**changes, "dtype": "float32"})
        return Recipe(cfg, prefix="model.", format="bf16", vision=None, shard_bytes=10**9)
    # Full size: as many shards as the published checkpoint has.
    shard_bytes = 10**6 if small else 3_350_000_000 if stored == "bf16" else 2_990_000_000
    tower = (2, 64, 128) if small else (27, 1152, 4304)
    return Recipe(_changed(cfg, changes), "model.language_model.", stored, tower if vision else None, shard_bytes)


def _changed(cfg, changes: dict[str, Any]):
    return dataclasses.replace(cfg, **{key: value for key, value in changes.items() if value is not None})


def plan(recipe: Recipe | DrafterRecipe, seed: int = 0) -> dict[str, list[NewTensor]]:
    """File name -> the tensors in it. Values follow from the seed and each tensor's name alone."""
    return (dflash2 if isinstance(recipe, DrafterRecipe) else model).files(recipe, seed)


def account(recipe: Recipe | DrafterRecipe) -> Account | DrafterAccount:
    """What loading the checkpoint would find in its headers, without writing it."""
    tensors = {
        tensor.name: TensorInfo(tensor.name, CODES[tensor.dtype], tensor.shape, Path(file), 0)
        for file, tensors in plan(recipe).items()
        for tensor in tensors
    }
    inventory = Inventory(Path("unwritten") / INDEX, tensors, (), ())
    take = take_drafter_account if isinstance(recipe, DrafterRecipe) else take_account
    return take(inventory, recipe.cfg, hf_config(recipe))


def hf_config(recipe: Recipe | DrafterRecipe) -> dict[str, Any]:
    """config.json."""
    return (dflash2 if isinstance(recipe, DrafterRecipe) else model).hf_config(recipe)


def write(
    destination: str | Path,
    recipe: Recipe | DrafterRecipe,
    *,
    seed: int = 0,
    tokenizer: str | Path | None = None,
    workers: int | None = None,
) -> None:
    """Writes the checkpoint; nothing stands at `destination` until all of it does.

    Args:
      seed: of the values, which `workers` does not change.
      tokenizer: a directory to copy tokenizer and chat template from.
      workers: threads that make and write tensors; None takes one for each core.

    Raises:
      CheckpointError: `destination` is taken, the disk is too small, or `tokenizer` has no tokenizer.json.
    """
    files = plan(recipe, seed)
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    with new_directory(destination) as partial, tqdm(total=total, unit="B", unit_scale=True) as progress:
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), partial)
        write_json(partial / "config.json", hf_config(recipe))
        if isinstance(recipe, Recipe):
            write_json(partial / "generation_config.json", model.generation_config(recipe.cfg))
            if recipe.format == "fast":
                rows = model.draft_rows(recipe.cfg)
                write_draft_ids(partial / DRAFT_IDS, recipe.cfg.vocab_size // rows * np.arange(rows))
        write_shards(partial, files, workers=workers or os.cpu_count() or 1, written=progress.update)
