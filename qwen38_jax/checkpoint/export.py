"""Writes `Params` as a Hugging Face directory: the inverse of loading."""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwen38_jax.checkpoint import names, native
from qwen38_jax.checkpoint.draft_ids import DRAFT_IDS, write_draft_ids
from qwen38_jax.checkpoint.drafter import drafter_places
from qwen38_jax.checkpoint.files import SINGLE
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.pack import Packed, quantization_config
from qwen38_jax.checkpoint.write import (
    NewTensor,
    copy_tokenizer,
    natural_order,
    new_directory,
    plan_shards,
    write_json,
    write_shards,
)
from qwen38_jax.config import DFlash2Config, ModelConfig, token_ids
from qwen38_jax.params import DFlash2Params, DraftHead, Params
from qwen38_jax.quantization import Indexed, QuantTensor, RowBlocks, Weight, in_rows, is_quantised


def export_checkpoint(
    directory: str | Path,
    params: Params,
    cfg: ModelConfig,
    *,
    draft_head: DraftHead | None = None,
    hf_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    prefix: str = "model.",
    shard_bytes: int = 5 * 10**9,
    copy_from: str | Path | None = None,
) -> None:
    """Writes weights, config.json and generation_config.json; what was loaded comes back bit for bit.

    The text model and its MTP head, that is: a vision tower is no part of `Params`. Integers are written in the format
    of compressed-tensors ("pack-quantized"), whichever they were loaded from; columns in another order than their own
    as `weight_g_idx`, which not every reader of that format knows.

    Args:
      directory: a new or empty directory; it appears under this name only when it is complete.
      params: shapes and dtypes as `abstract(cfg)`; matrices may be quantised.
      draft_head: rows of the head for the MTP head to draft from.
      hf_config: the config.json to write, with dtype and MTP count set to those of `cfg`; None writes `cfg.to_hf()`.
      generation_config: written with the stop ids of `cfg`.
      prefix: of the trunk's tensor names, one of `names.TRUNK_PREFIXES`.
      shard_bytes: most bytes of tensors in a file.
      copy_from: a directory to copy tokenizer and chat template from.

    Raises:
      ValueError: params, draft_head, cfg and hf_config contradict each other, or the prefix is unknown.
      CheckpointError: the directory is not empty, `copy_from` has no tokenizer, or the disk is too small.
    """
    if prefix not in names.TRUNK_PREFIXES:
        raise ValueError(f"prefix {prefix!r} is unknown; expected one of {names.TRUNK_PREFIXES}")
    config = cfg.to_hf() if hf_config is None else _agreeing_config(hf_config, cfg)
    generation = dict(generation_config or {})
    if token_ids(generation.get("eos_token_id"), "eos_token_id") != cfg.eos_token_ids:
        generation["eos_token_id"] = list(cfg.eos_token_ids)
    weights = _weights(params, draft_head, cfg, prefix)
    tensors = _stored(weights, config)
    with new_directory(directory) as partial:
        if copy_from is not None:
            copy_tokenizer(Path(copy_from), partial)
        write_shards(partial, plan_shards(tensors, shard_bytes))
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", generation)
        if draft_head is not None:
            write_draft_ids(partial / DRAFT_IDS, np.asarray(draft_head.ids))


def export_drafter(directory: str | Path, params: DFlash2Params, cfg: DFlash2Config) -> None:
    """Writes a DFlash2 drafter in its own layout: config.json and one file. Integers as `export_checkpoint`.

    Raises:
      ValueError: params and cfg contradict each other.
      CheckpointError: the directory is not empty, or the disk is too small.
    """
    leaves, places = jax.tree.leaves(params, is_leaf=is_quantised), drafter_places(cfg)
    if len(leaves) != len(places):
        raise ValueError(f"params have {len(leaves)} leaves, cfg {len(places)}")
    weights: list[Packed | NewTensor] = []
    for place, leaf in zip(places, leaves, strict=True):
        _check_leaf(place, leaf)
        weights += leaf_tensors(place, leaf, cfg.dtype, "")
    config = cfg.to_hf()
    tensors = _stored(weights, config)
    with new_directory(directory) as partial:
        write_shards(partial, {SINGLE: tensors})
        write_json(partial / "config.json", config)


def _stored(weights: list[Packed | NewTensor], config: dict[str, Any]) -> list[NewTensor]:
    """The tensors that stand for weights, in order; `config` is told how integers are stored."""
    matrices = [weight for weight in weights if isinstance(weight, Packed)]
    dense = [weight.name for weight in weights if isinstance(weight, NewTensor) and len(weight.shape) == 2]
    quantization = quantization_config(matrices, dense)
    if quantization is not None:
        config["quantization_config"] = quantization
    tensors = [tensor for weight in weights for tensor in (weight.tensors if isinstance(weight, Packed) else [weight])]
    return sorted(tensors, key=lambda tensor: natural_order(tensor.name))


def _agreeing_config(hf_config: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """`hf_config` with the dtype and the MTP head of `cfg`; all else must describe the same model already."""
    config = copy.deepcopy(dict(hf_config))
    config.pop("quantization_config", None)
    config.pop(native.KEY, None)
    text = config.get("text_config", config)
    for level in (config, text):
        level.pop("torch_dtype", None)
        level["dtype"] = cfg.dtype
    if text.get("mtp_num_hidden_layers", 0) != cfg.mtp_num_hidden_layers:
        text["mtp_num_hidden_layers"] = cfg.mtp_num_hidden_layers
    written = dataclasses.asdict(ModelConfig.from_hf(config))
    differing = [
        f"{name} ({written[name]!r}, not {value!r})"
        for name, value in dataclasses.asdict(cfg).items()
        if name != "eos_token_ids" and written[name] != value
    ]
    if differing:
        raise ValueError(f"hf_config describes another model than cfg: {', '.join(differing)}")
    return config


def _weights(params: Params, draft_head: DraftHead | None, cfg: ModelConfig, prefix: str) -> list[Packed | NewTensor]:
    """What is to be written of every leaf, which is held against `abstract(cfg)` first."""
    places, leaves = names.places(cfg), jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised)
    given = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if given.keys() != {place.path for place in places}:
        differing = sorted(given.keys() ^ {place.path for place in places})
        raise ValueError(f"params and cfg differ in the leaves {', '.join(differing)}")
    if draft_head is not None:
        ids = np.asarray(draft_head.ids)
        if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= cfg.vocab_size:
            raise ValueError(f"draft_head.ids must ascend and be below {cfg.vocab_size}, got {ids}")
        places.append(names.draft_place(cfg, len(ids)))
        given["draft_head"] = draft_head.weight
    weights = []
    for place in places:
        _check_leaf(place, given[place.path])
        weights += leaf_tensors(place, given[place.path], cfg.dtype, prefix)
    return weights


def _check_leaf(place: Place, leaf: Weight) -> None:
    info, dtype = place.info, np.dtype(leaf.dtype)
    if leaf.shape != info.shape or dtype != np.dtype(info.dtype):
        raise ValueError(
            f"params.{place.path} is {dtype}{list(leaf.shape)}, cfg makes it {info.dtype}{list(info.shape)}"
        )
    if is_quantised(leaf) and len(place.slices[0].shape) != 2:
        raise ValueError(f"params.{place.path} is quantised, but {list(place.slices[0].shape)} is no matrix")


def leaf_tensors(place: Place, leaf: Weight, model_dtype: str, prefix: str) -> Iterator[Packed | NewTensor]:
    """The weights of one leaf: those of each slice, one for each layer of a stacked leaf."""
    begin = 0
    for part in place.slices:
        block, rows = _block(place, leaf, slice(begin, begin + part.shape[0]))
        begin += part.shape[0]
        for layer, name in enumerate(part.names):
            spelled = names.spell(name, prefix)
            if isinstance(block, QuantTensor):
                yield _packed(spelled, block, layer if place.stacked else None, rows)
            else:
                dtype = _file_dtype(block, model_dtype)
                make = functools.partial(_host, block, layer if place.stacked else None, rows)
                yield NewTensor(spelled, dtype, part.shape, lambda make=make, dtype=dtype: [make().astype(dtype)])


def _block(place: Place, leaf: Weight, rows: slice) -> tuple[jax.Array | QuantTensor, slice]:
    """The block of a leaf that has the rows of a slice, and which rows of the block they are."""
    if not isinstance(leaf, RowBlocks):
        return leaf, rows
    begin = 0
    for block in leaf.blocks:
        end = begin + block.shape[-2]
        if begin <= rows.start and rows.stop <= end:
            return block, slice(rows.start - begin, rows.stop - begin)
        begin = end
    raise ValueError(f"params.{place.path} has a block that ends within rows {rows.start} to {rows.stop} of one tensor")


def _packed(name: str, w: QuantTensor, layer: int | None, rows: slice) -> Packed:
    n, k = rows.stop - rows.start, w.shape[-1]

    def matrix(w: QuantTensor) -> QuantTensor:
        return in_rows(w if layer is None else Indexed(w, layer).matrix)

    fields = {field: getattr(jax.eval_shape(matrix, w), field) for field in ("codes", "scales", "zeros", "group_of")}
    arrays = {
        field: (array.dtype.name, (k,) if field == "group_of" else (n, array.shape[-1]))
        for field, array in fields.items()
        if array is not None
    }

    def read(field: str) -> np.ndarray:
        return _host(getattr(matrix(w), field), None, slice(0, k) if field == "group_of" else rows)

    return Packed(name, (n, k), w.bits, arrays, read)


def _file_dtype(leaf: jax.Array, model_dtype: str) -> str:
    """The model's dtype where it holds the values exactly: A_log and dt_bias, fp32 in memory, may need to stay so."""
    own = leaf.dtype.name
    if own == model_dtype:
        return own
    values = np.asarray(leaf)
    with np.errstate(over="ignore"):
        exact = np.array_equal(values.astype(model_dtype).astype(own), values)
    return model_dtype if exact else own


def _host(array: jax.Array, layer: int | None, rows: slice) -> np.ndarray:
    """Rows of an array, or of one layer of a stacked one."""
    if layer is not None:
        array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
    return np.asarray(jax.lax.dynamic_slice_in_dim(array, rows.start, rows.stop - rows.start))
