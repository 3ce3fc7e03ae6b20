"""Loads a Hugging Face directory into `Params`, row by row, after every tensor has been accounted for."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.checkpoint import names, unpack
from qwen38_jax.checkpoint.accounting import Account, Assignment, place_bytes, take_account
from qwen38_jax.checkpoint.files import CheckpointError, TensorInfo, read_json, read_rows, reject, take_inventory
from qwen38_jax.checkpoint.leaves import Block, is_table, leaf_blocks
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.native import Spec
from qwen38_jax.checkpoint.unpack import Rows, row_chunks
from qwen38_jax.config import ConfigError, ModelConfig, token_ids
from qwen38_jax.params import DraftHead, Params, abstract
from qwen38_jax.quantization import BLOCK_ROWS, LAYOUTS, QuantTensor, RowBlocks, Weight, quant_tensor

_WORKERS = min(8, os.cpu_count() or 1)  # leaves that are loaded at a time; the host holds a few pieces of each


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
      path: the directory.
      cfg: dtype as asked for, `mtp_num_hidden_layers` as found, stop ids from generation_config.json if it has any.
      params: on the default device; arrays of the shapes and dtypes of `abstract(cfg)`, and `QuantTensor`s in place of
        matrices that the checkpoint stores in integers, `RowBlocks` where fused ones are not stored alike.
      draft_head: rows of the output head for the MTP head to draft from, if the checkpoint has some.
      hf_config, generation_config: the parsed files; the second is empty when there is none.
      prefix: the trunk's prefix in the files, one of `names.TRUNK_PREFIXES`.
      notes: what is unusual about the directory and harmless.
    """

    path: Path
    cfg: ModelConfig
    params: Params
    draft_head: DraftHead | None
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    prefix: str
    notes: tuple[str, ...]


def load_checkpoint(directory: str | Path, *, dtype: str | None = None) -> Checkpoint:
    """Loads the text model and, where there are some, MTP head and draft head; vision tensors are not read.

    Formats are those of `formats`; which one a weight has is told by its tensors. Integers stay integers, FP8 becomes
    `dtype`. On a GPU integers are packed for its kernels, unless their format is one that these do not read.

    Args:
      directory: holds config.json and safetensors files, with an index if there is more than one.
      dtype: `float32`, `bfloat16` or `float16`, of parameters stored in floats and of what quantised ones stand for;
        None takes the config's.

    Host memory beyond the arrays themselves stays near 100 MB a core (of at most 8), whatever the sizes of tensors
    and files.

    Raises:
      CheckpointError: a file or tensor is missing, unexpected, damaged, of a wrong shape or dtype, or of a format not
        read here, all of which is found before any tensor is read; a tied head differs from the embedding; a scale is
        not finite; zero points or weight_shape contradict the other tensors; a value is beyond the range of `dtype`.
      ConfigError: `dtype` is none of the three.
    """
    directory = Path(directory)
    account, hf_config, generation_config = sound_account(directory, dtype=dtype)
    if account.cfg.tie_word_embeddings:
        check_tied(account.sources)
    leaves = load_leaves(account)
    draft_head = None
    if account.draft_place is not None:
        draft_head = DraftHead(leaves.pop(), jnp.asarray(account.draft_ids))
    return Checkpoint(
        path=directory,
        cfg=account.cfg,
        params=jax.tree.unflatten(jax.tree.structure(abstract(account.cfg)), leaves),
        draft_head=draft_head,
        hf_config=hf_config,
        generation_config=generation_config,
        prefix=account.prefix,
        notes=account.notes,
    )


def loaded_bytes(directory: str | Path, *, dtype: str | None = None) -> int:
    """Bytes that `load_checkpoint` would allocate, told from the headers; raises what that raises before it reads."""
    return sound_account(directory, dtype=dtype)[0].nbytes


def sound_account(directory: str | Path, *, dtype: str | None = None) -> tuple[Account, dict[str, Any], dict[str, Any]]:
    """The account of a directory, its config.json and its generation_config.json, told from the headers.

    Raises what `load_checkpoint` raises before it reads.
    """
    directory = Path(directory)
    inventory = take_inventory(directory)
    hf_config, generation_config, cfg = read_config(directory)
    if dtype is not None:
        cfg = dataclasses.replace(cfg, dtype=dtype)
    reject(inventory.problems)
    account = take_account(inventory, cfg, hf_config)
    reject(account.problems)
    return account, hf_config, generation_config


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


def check_tied(sources: dict[str, TensorInfo]) -> None:
    """A tied checkpoint may carry the head as well, but then it must be the embedding, byte for byte."""
    heads, embeds = (
        {name.rpartition(".")[2]: tensor for name, tensor in sources.items() if name.startswith(beginning)}
        for beginning in ("lm_head.", "embed_tokens.")
    )
    for part, head in heads.items():
        if part not in embeds or not _same(head, embeds[part]):
            raise CheckpointError(
                f"{head} differs from {names.EMBED!r} although config.json ties them: "
                "remove the tensor, or set tie_word_embeddings to false"
            )


def _same(a: TensorInfo, b: TensorInfo) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(read_rows(a, *rows).tobytes() == read_rows(b, *rows).tobytes() for rows in row_chunks(a.shape))


def load_leaves(account: Assignment) -> list[Weight]:
    """The parameters of `account.places`, on the default device.

    Several at a time: one reads while another is on its way to the device, and what writes pieces there, a program for
    each shape, is compiled side by side.
    """
    device = jax.config.jax_default_device  # a thread does not inherit it

    def load(place: Place) -> Weight:
        with jax.default_device(device):
            return _load_place(place, account)

    pool = ThreadPoolExecutor(_WORKERS)
    try:
        largest_first = sorted(account.places, key=lambda place: -place_bytes(place, account.stored))
        jobs = {place.path: pool.submit(load, place) for place in largest_first}
        return [jobs[place.path].result() for place in account.places]
    finally:
        pool.shutdown(cancel_futures=True)


def _load_place(place: Place, account: Assignment) -> Weight:
    """One leaf of `Params`: an array, a `QuantTensor` where the account has integers, or `RowBlocks` of both kinds."""
    blocks = tuple(_load_block(block, place) for block in leaf_blocks(place, account.stored))
    return blocks[0] if len(blocks) == 1 else RowBlocks(blocks)


def _load_block(block: Block, place: Place) -> jax.Array | QuantTensor:
    if block.spec is not None and block.spec.layout == "rows" and not is_table(place.path) and packs_on_load():
        spec = block.spec.for_kernels(block.shape, block.arrays)
        if spec.layout != "rows":
            return _load_packed(block, spec, place)
    arrays = {name: _load_array(layers, place.stacked) for name, layers in block.arrays.items()}
    if block.spec is None:
        return arrays["weight"]
    if block.spec.layout == "rows":
        return quant_tensor(**arrays, bits=block.spec.bits, dtype=place.info.dtype)
    return block.spec.template(block.shape, arrays).replace(**arrays, dtype=place.info.dtype)


def packs_on_load() -> bool:
    """Whether matrices are brought into the layout of the kernels as they are loaded: where kernels are."""
    return jax.default_backend() == "gpu"


def _load_packed(block: Block, spec: Spec, place: Place) -> QuantTensor:
    """Integers in the layout of the kernels, packed on the device a piece at a time."""
    codes, scales = block.arrays["codes"], block.arrays["scales"]
    stack = (len(codes),) if place.stacked else ()
    template = spec.template(block.shape, block.arrays).replace(dtype=place.info.dtype)
    packed = jax.tree.map(lambda part: jnp.zeros((*stack, *part.shape), part.dtype), template)
    for layer, rows in enumerate(zip(codes, scales, strict=True)):
        for start, stop in row_chunks(codes[0].shape, multiple=BLOCK_ROWS):
            piece = [part.read(start, stop) for part in rows]
            corner = (*((layer,) if stack else ()), start // BLOCK_ROWS)
            packed = jax.block_until_ready(_write_packed(packed, *piece, corner))
    return packed


@functools.partial(jax.jit, donate_argnums=0)
def _write_packed(packed: QuantTensor, codes: jax.Array, scales: jax.Array, corner: tuple[int, ...]) -> QuantTensor:
    """`packed` with rows in the layout "rows" from `corner` on: the layer of a stack, and the block of rows."""
    rows = quant_tensor(codes, scales, bits=packed.bits, dtype=packed.dtype)
    piece = LAYOUTS[packed.layout].pack(rows)

    def write(array, part):
        return _write(array, part.reshape(*[1] * (array.ndim - part.ndim), *part.shape), corner)

    return packed.replace(codes=write(packed.codes, piece.codes), scales=write(packed.scales, piece.scales))


def _load_array(layers: list[Rows], stacked: bool) -> jax.Array:
    """One array. The host holds all of it only if it is small, or if the host's memory is the device's.

    (On CPU, writing in pieces would be slow besides: XLA widens all of a bf16 array to fp32 to update a part.)
    """
    nbytes = sum(math.prod(rows.shape) * np.dtype(rows.dtype).itemsize for rows in layers)
    if jax.default_backend() == "cpu" or nbytes <= unpack.CHUNK_BYTES:
        return jax.device_put(_fill_host(layers, stacked))
    return _fill_device(layers, stacked)


def _fill_host(layers: list[Rows], stacked: bool) -> np.ndarray:
    """The array in memory aligned to 64 bytes, which the CPU backend adopts without a copy."""
    shape, dtype = (len(layers), *layers[0].shape), np.dtype(layers[0].dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    array = memory[offset : offset + nbytes].view(dtype).reshape(shape)
    for layer, start, piece in _pieces(layers):
        array[layer, start : start + len(piece)] = piece
    return array if stacked else array[0]


def _fill_device(layers: list[Rows], stacked: bool) -> jax.Array:
    """The array on the device, written a piece at a time; waiting for each keeps one piece alive on the host."""
    shape = (len(layers), *layers[0].shape) if stacked else layers[0].shape
    array = jnp.zeros(shape, layers[0].dtype)
    for layer, start, piece in _pieces(layers):
        piece, corner = (piece[None], (layer, start)) if stacked else (piece, (start,))
        array = _write(array, piece, corner).block_until_ready()
    return array


@functools.partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, piece: jax.Array, corner: tuple[int, ...]) -> jax.Array:
    """`array` with `piece` at `corner`; later axes start at 0."""
    return jax.lax.dynamic_update_slice(array, piece, (*corner, *[0] * (array.ndim - len(corner))))


def _pieces(layers: list[Rows]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(layer, first row, rows) of everything that fills an array."""
    for layer, rows in enumerate(layers):
        for start, stop in row_chunks(rows.shape):
            yield layer, start, rows.read(start, stop)
