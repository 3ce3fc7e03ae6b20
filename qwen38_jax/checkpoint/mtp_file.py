"""An MTP head by itself: in a file of its own, and put into a copy of a checkpoint of which nothing else changes."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.accounting import Assignment, assign
from qwen38_jax.checkpoint.export import leaf_tensors
from qwen38_jax.checkpoint.files import CheckpointError, TensorInfo, read_header, read_rows, reject, take_inventory
from qwen38_jax.checkpoint.load import load_leaves, read_config
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.write import NewTensor, new_directory, write_safetensors
from qwen38_jax.config import ModelConfig
from qwen38_jax.params import MtpHead, abstract


def write_mtp(path: Path, head: MtpHead, cfg: ModelConfig) -> None:
    """Writes a head in floats under its names in a checkpoint, in the dtype of `cfg`; appears when it is whole."""
    tensors: list[NewTensor] = []
    for place, leaf in zip(_places(cfg), jax.tree.leaves(head), strict=True):
        tensors += leaf_tensors(place, leaf.astype(place.info.dtype), cfg.dtype, "")
    partial = path.with_name(f".{path.name}.partial")
    write_safetensors(partial, tensors)
    os.replace(partial, path)


def read_mtp(path: Path, cfg: ModelConfig) -> MtpHead:
    """The head of a file of `write_mtp`, in the dtype of `cfg`. Raises CheckpointError if it is another model's."""
    places = _places(cfg)
    stored, missing, unexpected, problems = assign(places, read_header(path), {})
    problems = [
        *problems,
        *(f"{path} lacks {n!r}" for n in missing),
        *(f"{path} has {n!r} as well" for n in unexpected),
    ]
    reject(problems)
    account = Assignment(tuple(places), stored, tuple(missing), tuple(unexpected), (), ())
    return jax.tree.unflatten(jax.tree.structure(abstract(cfg).mtp), load_leaves(account))


def replace_mtp(source: Path, destination: Path, head: Path) -> dict[str, int]:
    """A copy of the checkpoint `source` in the new directory `destination`, with the MTP head of the file `head`.

    Files are copied whole, and in the copies the bytes of the head's tensors are replaced: nothing else changes, of
    whatever kind it is. A draft head stays, as its rows are the output head's.

    Returns:
      How many tensors were replaced, and how many were copied as they are.

    Raises:
      CheckpointError: the source has no MTP head in floats of the same shapes and dtype; or `destination` is not new.
    """
    inventory = take_inventory(source)
    reject(inventory.problems)
    old = {names.parse(name).canonical: tensor for name, tensor in inventory.tensors.items()}
    new = read_header(head)
    _, _, cfg = read_config(source)
    expected = {name for place in _places(cfg) for name in place.names} if cfg.mtp_num_hidden_layers else set()
    if new.keys() != expected:
        raise CheckpointError(f"{head} is no MTP head for {source}: train one for this checkpoint")
    for name, tensor in new.items():
        there = old.get(name)
        if there is None or (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
            found = "is not there" if there is None else f"is {there.dtype} {list(there.shape)}"
            raise CheckpointError(
                f"{source}: tensor {name!r} {found}, not {tensor.dtype} {list(tensor.shape)}: take the checkpoint that "
                "has its MTP head in floats, in the dtype that the new one was written in"
            )
    with new_directory(destination) as partial:
        for path in sorted(source.iterdir()):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)  # never a link: what follows must not reach the source
        for name, tensor in new.items():
            _overwrite(partial / old[name].path.name, old[name], read_rows(tensor, 0, tensor.shape[0]))
    return {"replaced": len(new), "kept": len(inventory.tensors) - len(new)}


def _overwrite(path: Path, tensor: TensorInfo, values: np.ndarray) -> None:
    with path.open("r+b") as file:
        file.seek(tensor.begin)
        file.write(np.ascontiguousarray(values).view(np.uint8).tobytes())


def _places(cfg: ModelConfig) -> list[Place]:
    return [place for place in names.places(cfg) if place.path.startswith("mtp.")]
