"""Which tensor of a directory fills which place of the model, and what is left over or lacking."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.files import Inventory, TensorInfo
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.config import ModelConfig

_FLOATS = ("BF16", "F16", "F32")
_LOW_BIT_FLOATS = ("F8_", "F6_", "F4")

# Last part of a name -> the family of formats that stores a weight so.
_QUANTISED = {
    "weight_packed": "compressed-tensors (packed)",
    "qweight": "GPTQ or AWQ",
    "weight_scale_inv": "block-scaled FP8",
    "weight_scale_2": "NVFP4",
    "weight_scale": "scaled weights",
    "trellis": "EXL3",
}
_COMPANIONS = (
    *("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    *("qzeros", "scales", "g_idx", "input_scale", "input_global_scale", "suh", "svh", "mcg", "mul1"),
)


@dataclasses.dataclass(frozen=True)
class Account:
    """Every tensor of a checkpoint, assigned.

    Attributes:
      cfg: the config, with `mtp_num_hidden_layers` as found in the files.
      prefix: the trunk's prefix, one of `names.TRUNK_PREFIXES`.
      sources: tensors by canonical name, vision left out.
      missing, unexpected: names as the checkpoint spells (or would spell) them.
      quantised: the format of the first quantised tensor, or None for a dense checkpoint.
      problems: why it cannot be loaded, one message each; empty when every tensor is accounted for.
      notes: what is unusual and harmless.
    """

    cfg: ModelConfig
    prefix: str
    sources: dict[str, TensorInfo]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    quantised: str | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def take_account(inventory: Inventory, cfg: ModelConfig, hf_config: Mapping[str, Any]) -> Account:
    """Holds the headers' tensors against `abstract(cfg)`. Reads no tensor data and raises nothing."""
    sources, prefix, problems = _assign(inventory)
    has_mtp = any(canonical.startswith("mtp.") for canonical in sources)
    notes = list(inventory.notes)
    if cfg.mtp_num_hidden_layers and not has_mtp:
        notes.append(f"{inventory.listing} has no mtp.* tensors: the MTP head that config.json announces is absent")
    cfg = dataclasses.replace(cfg, mtp_num_hidden_layers=int(has_mtp))
    expected = {name: place for place in names.places(cfg) for name in place.names}
    packed, quantised, first = _quantised(sources, expected, hf_config)
    stored_packed = set(packed.values())
    optional = {names.HEAD} if cfg.tie_word_embeddings else set()
    missing = [name for name in expected if name not in sources and name not in stored_packed]
    unexpected = [name for name in sources if name not in (expected.keys() | packed.keys() | optional)]
    if quantised is not None:
        remedy = "quantised checkpoints are not supported by this version; use a bf16 one"
        problems.insert(0, f"{first} is {quantised}: {remedy}")
    problems += [_missing(inventory, name, prefix) for name in missing]
    problems += [f"{sources[name]} is not part of the model that config.json describes" for name in unexpected]
    for name, place in expected.items():
        if name in sources and name not in stored_packed:
            problems += _mismatch(sources[name], place)
    return Account(
        cfg=cfg,
        prefix=prefix,
        sources=sources,
        missing=tuple(names.spell(name, prefix) for name in missing),
        unexpected=tuple(sources[name].name for name in unexpected),
        quantised=quantised,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _assign(inventory: Inventory) -> tuple[dict[str, TensorInfo], str, list[str]]:
    """Tensors by canonical name, the trunk's prefix, and what is wrong with the spelling."""
    sources: dict[str, TensorInfo] = {}
    first: dict[str, TensorInfo] = {}  # of each prefix of the trunk
    problems = []
    for name, tensor in inventory.tensors.items():
        parsed = names.parse(name)
        if parsed.kind == "vision":
            continue
        if parsed.kind == "trunk":
            first.setdefault(parsed.prefix, tensor)
        if parsed.canonical in sources:
            problems.append(f"{tensor} is another spelling of {sources[parsed.canonical]}: keep one of the two")
        sources.setdefault(parsed.canonical, tensor)
    if len(first) > 1:
        examples = " and ".join(str(tensor) for tensor in first.values())
        problems.append(f"the names of the text model mix prefixes: {examples}; rename them to one prefix")
    return sources, next(iter(first), "model."), problems


def _quantised(
    sources: Mapping[str, TensorInfo], expected: Mapping[str, Place], hf_config: Mapping[str, Any]
) -> tuple[dict[str, str], str | None, TensorInfo | None]:
    """Tensors of quantised weights -> the dense weight each stands for; the format; the first tensor that tells it."""
    packed, format_of = {}, {}
    for name, tensor in sources.items():
        module, _, last = name.rpartition(".")
        weight = f"{module}.weight"
        if (last in _QUANTISED or last in _COMPANIONS) and weight in expected:
            packed[name] = weight
            format_of[name] = _QUANTISED.get(last)
        elif tensor.dtype.startswith(_LOW_BIT_FLOATS) and name in expected:
            packed[name] = name
            format_of[name] = tensor.dtype
    telling = next((name for name in packed if format_of[name]), None)  # a companion may come before it
    if telling is None:
        return {}, None, None
    declared = hf_config.get("quantization_config")
    method = declared.get("quant_method", "not named") if isinstance(declared, Mapping) else "not declared"
    return packed, f"{format_of[telling]}, quant_method {method}", sources[telling]


def _missing(inventory: Inventory, canonical: str, prefix: str) -> str:
    name = names.spell(canonical, prefix)
    message = f"{inventory.listing} lacks tensor {name!r}"
    if canonical == names.HEAD:
        return f"{message}: set tie_word_embeddings in config.json if the embedding is the head, or restore the tensor"
    if canonical.startswith("mtp."):
        return f"{message}: the MTP head is incomplete; restore the tensor, or remove all of mtp.*"
    return f"{message}: download the shard that holds it, or correct config.json"


def _mismatch(tensor: TensorInfo, place: Place) -> list[str]:
    problems = []
    if tensor.shape != place.shape:
        problems.append(
            f"{tensor} has shape {list(tensor.shape)}, but config.json makes it {list(place.shape)}: "
            "config.json and weights belong to different checkpoints"
        )
    if tensor.dtype not in _FLOATS:
        problems.append(f"{tensor} has dtype {tensor.dtype}, expected one of {', '.join(_FLOATS)}")
    return problems
