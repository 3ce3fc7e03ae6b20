"""Loads a Hugging Face directory into `Params`, row by row, after every tensor has been accounted for."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.accounting import take_account
from qwen38_jax.checkpoint.files import CheckpointError, TensorInfo, read_json, read_rows, reject, take_inventory
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.config import ConfigError, ModelConfig, token_ids
from qwen38_jax.params import Params, abstract

# Largest piece of a tensor on its way to the device, in fp32. What the host holds beside the arrays is a few of these.
_CHUNK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
      path: the directory.
      cfg: dtype as asked for, `mtp_num_hidden_layers` as found, stop ids from generation_config.json if it has any.
      params: arrays on the default device, shapes and dtypes as `abstract(cfg)`.
      hf_config, generation_config: the parsed files; the second is empty when there is none.
      prefix: the trunk's prefix in the files, one of `names.TRUNK_PREFIXES`.
      notes: what is unusual about the directory and harmless.
    """

    path: Path
    cfg: ModelConfig
    params: Params
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    prefix: str
    notes: tuple[str, ...]


def load_checkpoint(directory: str | Path, *, dtype: str | None = None) -> Checkpoint:
    """Loads the text model and, where there is one, the MTP head; vision tensors are not read.

    Args:
      directory: holds config.json and safetensors files, with an index if there is more than one.
      dtype: `float32`, `bfloat16` or `float16` for the parameters; None takes the config's.

    Host memory beyond the arrays themselves stays near 100 MB, whatever the sizes of tensors and files.

    Raises:
      CheckpointError: a file or tensor is missing, unexpected, damaged, of a wrong shape or dtype, or quantised, all
        of which is found before any tensor is read; a tied head differs from the embedding; a value is beyond the
        range of `dtype`.
      ConfigError: `dtype` is none of the three.
    """
    directory = Path(directory)
    inventory = take_inventory(directory)
    hf_config, generation_config, cfg = read_config(directory)
    if dtype is not None:
        cfg = dataclasses.replace(cfg, dtype=dtype)
    reject(inventory.problems)
    account = take_account(inventory, cfg, hf_config)
    reject(account.problems)
    if account.cfg.tie_word_embeddings and names.HEAD in account.sources:
        _check_tied(account.sources[names.HEAD], account.sources[names.EMBED])
    leaves = [
        _load_place(place, [account.sources[name] for name in place.names]) for place in names.places(account.cfg)
    ]
    return Checkpoint(
        path=directory,
        cfg=account.cfg,
        params=jax.tree.unflatten(jax.tree.structure(abstract(account.cfg)), leaves),
        hf_config=hf_config,
        generation_config=generation_config,
        prefix=account.prefix,
        notes=account.notes,
    )


def read_config(directory: Path) -> tuple[dict[str, Any], dict[str, Any], ModelConfig]:
    """config.json, generation_config.json (empty when absent), and the ModelConfig that both make."""
    path = directory / "config.json"
    hf_config = read_json(path)
    try:
        cfg = ModelConfig.from_hf(hf_config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    path = directory / "generation_config.json"
    generation_config = read_json(path) if path.exists() else {}
    try:
        # The chat model stops at ids that config.json, written before the chat tuning, does not know.
        stop_ids = token_ids(generation_config.get("eos_token_id"), "eos_token_id")
        cfg = dataclasses.replace(cfg, eos_token_ids=stop_ids or cfg.eos_token_ids)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return hf_config, generation_config, cfg


def _check_tied(head: TensorInfo, embed: TensorInfo) -> None:
    """A tied checkpoint may carry the head as well, but then it must be the embedding, byte for byte."""
    same = (head.dtype, head.shape) == (embed.dtype, embed.shape)
    if not same or any(
        read_rows(head, *rows).tobytes() != read_rows(embed, *rows).tobytes() for rows in _row_chunks(head)
    ):
        raise CheckpointError(
            f"{head} differs from {embed.name!r} although config.json ties them: "
            "remove the tensor, or set tie_word_embeddings to false"
        )


def _load_place(place: Place, tensors: list[TensorInfo]) -> jax.Array:
    """One leaf of `Params`. The host holds all of it only if it is small, or if the host's memory is the device's.

    (On CPU, writing in pieces would be slow besides: XLA widens all of a bf16 array to fp32 to update a part.)
    """
    if jax.default_backend() == "cpu" or place.info.nbytes <= _CHUNK_BYTES:
        return jax.device_put(_fill_host(place, tensors))
    return _fill_device(place, tensors)


def _fill_host(place: Place, tensors: list[TensorInfo]) -> np.ndarray:
    """The leaf in memory aligned to 64 bytes, which the CPU backend adopts without a copy."""
    info = place.info
    memory = np.empty(info.nbytes + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    leaf = memory[offset : offset + info.nbytes].view(info.dtype).reshape(info.shape)
    layers = leaf if place.stacked else leaf[None]
    for layer, start, rows in _pieces(place, tensors):
        layers[layer, start : start + len(rows)] = rows
    return leaf


def _fill_device(place: Place, tensors: list[TensorInfo]) -> jax.Array:
    """The leaf on the device, written a piece at a time; waiting for each keeps one piece alive on the host."""
    leaf = jnp.zeros(place.info.shape, place.info.dtype)
    for layer, start, rows in _pieces(place, tensors):
        piece, corner = (rows[None], (layer, start)) if place.stacked else (rows, (start,))
        leaf = _write(leaf, piece, corner).block_until_ready()
    return leaf


@functools.partial(jax.jit, donate_argnums=0)
def _write(leaf: jax.Array, piece: jax.Array, corner: tuple[int, ...]) -> jax.Array:
    """`leaf` with `piece` at `corner`; later axes start at 0."""
    return jax.lax.dynamic_update_slice(leaf, piece, (*corner, *[0] * (leaf.ndim - len(corner))))


def _pieces(place: Place, tensors: list[TensorInfo]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(layer, first row, rows in the leaf's dtype) of everything that fills a leaf."""
    row_shape = place.info.shape[2:] if place.stacked else place.info.shape[1:]
    for layer, tensor in enumerate(tensors):
        for start, stop in _row_chunks(tensor):
            rows = _read_as(tensor, start, stop, np.dtype(place.info.dtype))
            yield layer, start, rows.reshape(stop - start, *row_shape)


def _row_chunks(tensor: TensorInfo) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover a tensor, all of one length, so that one compiled write serves them all."""
    rows = tensor.shape[0]
    step = min(rows, max(1, _CHUNK_BYTES // (4 * math.prod(tensor.shape[1:]))))
    for start in range(0, rows, step):
        start = min(start, rows - step)  # the last chunk goes over some rows again
        yield start, start + step


def _read_as(tensor: TensorInfo, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Rows of a tensor in `dtype`; a finite value that `dtype` cannot hold is an error, not an infinity."""
    values = read_rows(tensor, start, stop)
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if jnp.finfo(dtype).max < jnp.finfo(values.dtype).max:
        lost = np.isinf(cast) & np.isfinite(values)
        if lost.any():
            raise CheckpointError(
                f"{tensor} holds {values[lost][0]}, beyond the range of {dtype}: load with a wider dtype"
            )
    return cast
