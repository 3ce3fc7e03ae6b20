"""Which tensors of a directory fill which place of the model, in which format, and what is left over or lacking."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.draft_ids import DRAFT_IDS, read_draft_ids
from qwen38_jax.checkpoint.files import DTYPES, CheckpointError, Inventory, TensorInfo
from qwen38_jax.checkpoint.formats import PARTS, Declared, Stored, classify
from qwen38_jax.checkpoint.names import Place, Slice
from qwen38_jax.checkpoint.native import KEY, Native, Spec, native_place
from qwen38_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Tensors held against the places that they are to fill.

    Attributes:
      places: of every parameter.
      stored: how each weight is stored, by canonical name; without those that `problems` tells of.
      missing, unexpected: names as the checkpoint spells (or would spell) them.
      problems: why it cannot be loaded, one message each; empty when every tensor is accounted for.
      notes: what is unusual and harmless.
    """

    places: tuple[Place, ...]
    stored: dict[str, Stored]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def quantised(self) -> str | None:
        """The formats of quantised weights in words, or None for a dense checkpoint."""
        labels = {stored.label: None for stored in self.stored.values() if stored.kind != "dense"}
        return ", ".join(labels) or None

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters once they are loaded; zero points counted wherever there may be some."""
        return sum(place_bytes(place, self.stored) for place in self.places)


@dataclasses.dataclass(frozen=True)
class Account(Assignment):
    """Every tensor of a checkpoint, assigned.

    Attributes:
      cfg: the config, with `mtp_num_hidden_layers` as found in the files.
      prefix: the trunk's prefix, one of `names.TRUNK_PREFIXES`.
      sources: tensors by canonical name, vision left out.
      draft_place, draft_ids: the draft head's place and the token ids of its rows, or None and None.
    """

    cfg: ModelConfig
    prefix: str
    sources: dict[str, TensorInfo]
    draft_place: Place | None
    draft_ids: np.ndarray | None


def take_account(inventory: Inventory, cfg: ModelConfig, hf_config: Mapping[str, Any]) -> Account:
    """Holds the headers' tensors against `abstract(cfg)`. Reads no tensor data.

    Raises:
      CheckpointError: config.json announces a prepared checkpoint that this version cannot read.
    """
    native = Native.from_hf(hf_config)
    if native is None:
        sources, prefix, problems = _by_canonical_name(inventory)
        spell = functools.partial(names.spell, prefix=prefix)
        foreign = [tensor for name, tensor in sources.items() if names.parse(name).kind == "native"][:1]
        problems += [f"{tensor} is of a prepared checkpoint, but config.json has no {KEY!r}" for tensor in foreign]
    else:
        sources, prefix, problems = dict(inventory.tensors), native.prefix, []
        spell = str
    has_mtp = any(name.startswith("mtp.") and not name.startswith("mtp.draft_lm_head.") for name in sources)
    notes = list(inventory.notes)
    if cfg.mtp_num_hidden_layers and not has_mtp:
        notes.append(f"{inventory.listing} has no mtp.* tensors: the MTP head that config.json announces is absent")
    cfg = dataclasses.replace(cfg, mtp_num_hidden_layers=int(has_mtp))
    places = names.places(cfg) if native is None else native.places(names.places(cfg))
    draft_place, draft_ids, draft_problems = _draft_head(inventory, sources, cfg, native)
    if draft_place is not None:
        places.append(draft_place)
    stored, missing, unexpected, faults = assign(places, sources, hf_config)
    if cfg.tie_word_embeddings:  # the head may be there all the same; loading compares it with the embedding
        unexpected = [name for name in unexpected if not _is_head(name)]
    problems += [_missing(inventory, name, spell(name)) for name in missing]
    problems += [f"{sources[name]} is not part of the model that config.json describes" for name in unexpected]
    return Account(
        places=tuple(places),
        stored=stored,
        missing=tuple(spell(name) for name in missing),
        unexpected=tuple(sources[name].name for name in unexpected),
        problems=(*problems, *draft_problems, *faults),
        notes=tuple(notes),
        cfg=cfg,
        prefix=prefix,
        sources=sources,
        draft_place=draft_place,
        draft_ids=draft_ids,
    )


def assign(
    places: Iterable[Place], sources: Mapping[str, TensorInfo], hf_config: Mapping[str, Any]
) -> tuple[dict[str, Stored], list[str], list[str], list[str]]:
    """Holds tensors, by canonical name, against the places of all parameters.

    Returns:
      How each weight is stored; the weights that are missing; the tensors that are of none; what is wrong with others.
    """
    expected = {name: part for place in places for part in place.slices for name in part.names}
    parts, unexpected = _group(sources, expected)
    stored, problems, declared = {}, [], Declared.from_hf(hf_config)
    for name in (name for name in expected if name in parts):
        result = classify(name, parts[name], expected[name].shape, declared)
        if isinstance(result, Stored):
            stored[name] = result
        else:
            problems += result
    for part in (part for place in places for part in place.slices):
        problems += _mixture(part, stored)
    return stored, [name for name in expected if name not in parts], unexpected, problems


def _by_canonical_name(inventory: Inventory) -> tuple[dict[str, TensorInfo], str, list[str]]:
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


def _group(
    sources: Mapping[str, TensorInfo], expected: Mapping[str, Slice]
) -> tuple[dict[str, dict[str, TensorInfo]], list[str]]:
    """The tensors of each expected weight, by the last part of their names; and the names that are of none."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    unexpected = []
    for name, tensor in sources.items():
        module, _, last = name.rpartition(".")
        if last in PARTS and f"{module}.weight" in expected:
            parts.setdefault(f"{module}.weight", {})[last] = tensor
        elif name in expected:  # A_log and dt_bias
            parts[name] = {"weight": tensor}
        else:
            unexpected.append(name)
    return parts, unexpected


def _is_head(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return module == "lm_head" and last in PARTS


def _draft_head(
    inventory: Inventory, sources: Mapping[str, TensorInfo], cfg: ModelConfig, native: Native | None
) -> tuple[Place | None, np.ndarray | None, list[str]]:
    """The draft head's place and token ids, if the checkpoint has one, and what is wrong with them."""
    module = "draft_head" if native else names.DRAFT_HEAD.removesuffix(".weight")
    values = [f"{module}.{part}" for part in ("weight", "weight_packed", "codes")]
    tensor = next((sources[name] for name in values if name in sources), None)
    if tensor is None or not tensor.shape:
        return None, None, []
    place = names.draft_place(cfg, tensor.shape[0])
    directory = inventory.listing if inventory.listing.is_dir() else inventory.listing.parent
    path = directory / DRAFT_IDS
    try:
        ids = read_draft_ids(path)
    except CheckpointError as error:
        return place, None, [str(error)]
    if native:  # whose codes need not be in rows; they are held against the ids' number later
        place = native_place(names.draft_place(cfg, len(ids)), apart=False)
    elif len(ids) != tensor.shape[0]:
        return place, None, [f"{path} names {len(ids)} tokens, but {tensor} has {tensor.shape[0]} rows"]
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= cfg.vocab_size:
        fault = f"ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different ones of {len(ids)}"
        return place, None, [f"{path} has {fault}; expected ascending ones below {cfg.vocab_size}"]
    return place, ids.astype(np.int32), []


def _mixture(part: Slice, stored: Mapping[str, Stored]) -> list[str]:
    """Stacked layers are one array, so that they must be integers of one width, group and layout, or floats."""
    layers = [stored[name] for name in part.names if name in stored]
    for layer in layers:
        if (layer.bits, layer.group, layer.layout) != (layers[0].bits, layers[0].group, layers[0].layout):
            return [
                f"{layer.main} is stored as {layer.label}, {layers[0].main} as {layers[0].label}: layers of one kind "
                "must be stored alike in this version"
            ]
    return []


def place_bytes(place: Place, stored: Mapping[str, Stored]) -> int:
    """Bytes of one leaf of the parameters."""
    return sum(weight_bytes(stored[name], place.info.dtype) for name in place.names)


def weight_bytes(stored: Stored, dtype: str) -> int:
    """Bytes of one weight; what it is of floats becomes `dtype`."""
    values = math.prod(stored.shape)
    if not stored.bits:
        return values * np.dtype(dtype).itemsize
    if stored.kind == "native":
        return sum(tensor.nbytes for tensor in stored.parts.values())
    groups = values // stored.group
    scale = 4 if any(tensor.dtype == "F32" for tensor in stored.parts.values()) else 2
    has_zeros = "qzeros" in stored.parts or "weight_zero_point" in stored.parts
    order = 4 * stored.shape[-1] if "g_idx" in stored.parts or "weight_g_idx" in stored.parts else 0
    return values * stored.bits // 8 + groups * (scale + has_zeros) + order


def read_by_kernels(stored: Stored) -> bool:
    """Whether a kernel can read the integers of a matrix; not if there may be zero points, or columns out of order."""
    if not stored.bits:
        return False
    if stored.spec is not None:
        return stored.spec.for_kernels(stored.shape, stored.parts).layout != "rows"
    scales = stored.parts["weight_scale" if stored.kind == "packed" else "scales"]
    fields = {"zeros": ("qzeros", "weight_zero_point"), "group_of": ("g_idx", "weight_g_idx")}
    present = [field for field, parts in fields.items() if any(part in stored.parts for part in parts)]
    spec = Spec(stored.bits, stored.group, DTYPES[scales.dtype], "rows")
    return spec.for_kernels(stored.shape, present).layout != "rows"


def _missing(inventory: Inventory, canonical: str, name: str) -> str:
    message = f"{inventory.listing} lacks tensor {name!r}"
    if canonical == names.HEAD:
        return f"{message}: set tie_word_embeddings in config.json if the embedding is the head, or restore the tensor"
    if canonical.startswith("mtp."):
        return f"{message}: the MTP head is incomplete; restore the tensor, or remove all of mtp.*"
    return f"{message}: download the shard that holds it, or correct config.json"
