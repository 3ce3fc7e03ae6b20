"""DFlash2 drafters: the names of their tensors, what a directory of one holds, and loading it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from qwen38_jax.checkpoint.accounting import Assignment, assign
from qwen38_jax.checkpoint.files import CheckpointError, Inventory, read_json, reject, take_inventory
from qwen38_jax.checkpoint.load import load_leaves
from qwen38_jax.checkpoint.names import Place, place
from qwen38_jax.checkpoint.native import Native
from qwen38_jax.config import ConfigError, DFlash2Config
from qwen38_jax.params import DFlash2Params, abstract_dflash2

_TOP = {
    "fc": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "selector.projection": "candidate_selector.hidden_projection.weight",
    "selector.predecessors": "candidate_selector.predecessor_codebook",
    "selector.successors": "candidate_selector.successor_codebook",
}
_LAYER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.kv": ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.o": "self_attn.o_proj.weight",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "mlp.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down": "mlp.down_proj.weight",
    **{f"{conv}.base": f"{conv}.base_kernel" for conv in ("attention_conv", "mlp_conv")},
    **{f"{conv}.projection": f"{conv}.kernel_projection.weight" for conv in ("attention_conv", "mlp_conv")},
}


DRAFTER_CLASSES = ("attention", "mlp", "convolutions", "norms", "fc", "selector", "unknown")


def drafter_class(name: str) -> str:
    """The one of `DRAFTER_CLASSES` that `inspect` counts a tensor under."""
    marks = {
        "norm.": "norms",
        "_conv.": "convolutions",
        "attn.": "attention",
        "attention.": "attention",  # as prepared, by the fields of `DFlash2Params`
        "mlp.": "mlp",
        "fc.": "fc",
        "selector.": "selector",
    }
    return next((part for mark, part in marks.items() if mark in name), "unknown")


def drafter_places(cfg: DFlash2Config) -> list[Place]:
    """Every leaf of `abstract_dflash2(cfg)`, in the order of `jax.tree.leaves`, with the tensors that fill it."""
    result = []
    for path, info in jax.tree_util.tree_leaves_with_path(abstract_dflash2(cfg)):
        dotted = jax.tree_util.keystr(path, simple=True, separator=".")
        part, _, rest = dotted.partition(".")
        if part == "layers":
            prefixes = [f"layers.{n}." for n in range(cfg.num_hidden_layers)]
            result.append(place(dotted, info, _LAYER[rest], prefixes, stacked=True))
        else:
            result.append(place(dotted, info, _TOP[dotted], [""], stacked=False))
    return result


@dataclasses.dataclass(frozen=True)
class DrafterAccount(Assignment):
    """Every tensor of a drafter, assigned."""

    cfg: DFlash2Config


def take_drafter_account(inventory: Inventory, cfg: DFlash2Config, hf_config: Mapping[str, Any]) -> DrafterAccount:
    """Holds the headers' tensors against `abstract_dflash2(cfg)`. Reads no tensor data.

    Raises:
      CheckpointError: config.json announces a prepared drafter that this version cannot read.
    """
    native, places = Native.from_hf(hf_config), drafter_places(cfg)
    if native is not None:
        places = native.places(places)
    stored, missing, unexpected, faults = assign(places, inventory.tensors, hf_config)
    problems = [
        f"{inventory.listing} lacks tensor {name!r}: download the drafter again, or correct its config.json"
        for name in missing
    ]
    problems += [
        f"{inventory.tensors[name]} is not part of the drafter that config.json describes" for name in unexpected
    ]
    return DrafterAccount(
        places=tuple(places),
        stored=stored,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        problems=(*problems, *faults),
        notes=inventory.notes,
        cfg=cfg,
    )


def read_drafter_config(directory: Path) -> tuple[dict[str, Any], DFlash2Config]:
    """config.json and the DFlash2Config that it makes; CheckpointError when there is no such file or drafter."""
    path = directory / "config.json"
    hf_config = read_json(path)
    try:
        return hf_config, DFlash2Config.from_hf(hf_config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def drafter_account(directory: str | Path, *, dtype: str | None = None) -> DrafterAccount:
    """A sound account of a drafter's directory, from its headers; raises what `load_drafter` does before it reads."""
    directory = Path(directory)
    inventory = take_inventory(directory)
    hf_config, cfg = read_drafter_config(directory)
    if dtype is not None:
        cfg = dataclasses.replace(cfg, dtype=dtype)
    reject(inventory.problems)
    account = take_drafter_account(inventory, cfg, hf_config)
    reject(account.problems)
    return account


def load_drafter(directory: str | Path, *, dtype: str | None = None) -> tuple[DFlash2Params, DFlash2Config]:
    """Loads a DFlash2 drafter, stored in floats or (its matrices) in integers, onto the default device.

    Args:
      directory: holds config.json and safetensors files.
      dtype: `float32`, `bfloat16` or `float16`, of what is stored in floats and of what integers stand for; None takes
        the config's.

    Returns:
      Arrays of the shapes and dtypes of `abstract_dflash2(cfg)`, `QuantTensor`s in place of matrices in integers; and
      the config, with `dtype` as asked for.

    Raises:
      CheckpointError, ConfigError: as `load_checkpoint`.
    """
    account = drafter_account(directory, dtype=dtype)
    leaves = load_leaves(account)
    return jax.tree.unflatten(jax.tree.structure(abstract_dflash2(account.cfg)), leaves), account.cfg
