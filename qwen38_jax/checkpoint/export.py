"""Writes `Params` as a Hugging Face directory: the inverse of loading."""

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.write import (
    NewTensor,
    copy_tokenizer,
    natural_order,
    new_directory,
    plan_shards,
    write_json,
    write_shards,
)
from qwen38_jax.config import ModelConfig, token_ids
from qwen38_jax.params import Params
from qwen38_jax.quantization import is_quantised


def export_checkpoint(
    directory: str | Path,
    params: Params,
    cfg: ModelConfig,
    *,
    hf_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    prefix: str = "model.",
    shard_bytes: int = 5 * 10**9,
    copy_from: str | Path | None = None,
) -> None:
    """Writes weights, config.json and generation_config.json; what was loaded comes back bit for bit.

    The text model and its MTP head, that is: a vision tower is no part of `Params`.

    Args:
      directory: a new or empty directory; it appears under this name only when it is complete.
      params: shapes and dtypes as `abstract(cfg)`.
      hf_config: the config.json to write, with dtype and MTP count set to those of `cfg`; None writes `cfg.to_hf()`.
      generation_config: written with the stop ids of `cfg`.
      prefix: of the trunk's tensor names, one of `names.TRUNK_PREFIXES`.
      shard_bytes: most bytes of tensors in a file.
      copy_from: a directory to copy tokenizer and chat template from.

    Raises:
      ValueError: params are quantised, params, cfg and hf_config contradict each other, or the prefix is unknown.
      CheckpointError: the directory is not empty, `copy_from` has no tokenizer, or the disk is too small.
    """
    if prefix not in names.TRUNK_PREFIXES:
        raise ValueError(f"prefix {prefix!r} is unknown; expected one of {names.TRUNK_PREFIXES}")
    config = cfg.to_hf() if hf_config is None else _agreeing_config(hf_config, cfg)
    generation = dict(generation_config or {})
    if token_ids(generation.get("eos_token_id"), "eos_token_id") != cfg.eos_token_ids:
        generation["eos_token_id"] = list(cfg.eos_token_ids)
    places = names.places(cfg)
    _check_params(places, params)
    tensors = [
        tensor
        for place, leaf in zip(places, jax.tree.leaves(params), strict=True)
        for tensor in _tensors(place, leaf, cfg.dtype, prefix)
    ]
    tensors.sort(key=lambda tensor: natural_order(tensor.name))
    with new_directory(directory) as partial:
        if copy_from is not None:
            copy_tokenizer(Path(copy_from), partial)
        write_shards(partial, plan_shards(tensors, shard_bytes))
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", generation)


def _agreeing_config(hf_config: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """`hf_config` with the dtype and the MTP head of `cfg`; all else must describe the same model already."""
    config = copy.deepcopy(dict(hf_config))
    config.pop("quantization_config", None)
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


def _check_params(places: list[Place], params: Params) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised)
    given = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    for path, leaf in given.items():
        if is_quantised(leaf):
            raise ValueError(f"params.{path} is quantised: export writes dense weights, so dequantize it first")
    if given.keys() != {place.path for place in places}:
        differing = sorted(given.keys() ^ {place.path for place in places})
        raise ValueError(f"params and cfg differ in the leaves {', '.join(differing)}")
    for place in places:
        leaf, info = given[place.path], place.info
        if leaf.shape != info.shape or leaf.dtype != np.dtype(info.dtype):
            raise ValueError(
                f"params.{place.path} is {leaf.dtype}{list(leaf.shape)}, cfg makes it {info.dtype}{list(info.shape)}"
            )


def _tensors(place: Place, leaf: jax.Array, model_dtype: str, prefix: str) -> Iterable[NewTensor]:
    """The tensors of one leaf: those of each slice, one for each layer of a stacked leaf."""
    dtype = _file_dtype(leaf, model_dtype)
    begin = 0
    for part in place.slices:
        end = begin + part.shape[0]
        for layer, name in enumerate(part.names):
            rows = functools.partial(_rows, leaf, layer if place.stacked else None, begin, end, dtype)
            yield NewTensor(names.spell(name, prefix), dtype, part.shape, rows)
        begin = end


def _file_dtype(leaf: jax.Array, model_dtype: str) -> str:
    """The model's dtype where it holds the values exactly: A_log and dt_bias, fp32 in memory, may need to stay so."""
    own = leaf.dtype.name
    if own == model_dtype:
        return own
    values = np.asarray(leaf)
    with np.errstate(over="ignore"):
        exact = np.array_equal(values.astype(model_dtype).astype(own), values)
    return model_dtype if exact else own


def _rows(leaf: jax.Array, layer: int | None, begin: int, end: int, dtype: str) -> Iterable[np.ndarray]:
    if layer is not None:
        leaf = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    yield np.asarray(jax.lax.dynamic_slice_in_dim(leaf, begin, end - begin)).astype(dtype, copy=False)
