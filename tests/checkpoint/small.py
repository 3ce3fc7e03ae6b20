"""A checkpoint of one group of layers that takes milliseconds to write, and ways to change and to break it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from qwen38_jax.checkpoint.files import INDEX
from qwen38_jax.checkpoint.synthetic import SMALL, Recipe, write
from qwen38_jax.quantization import in_rows, is_quantised

CFG = dataclasses.replace(
    SMALL,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    head_dim=16,
    rotary_dim=4,
    mrope_section=(1, 1, 0),
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    vocab_size=32,
    dtype="float32",
)
RECIPE = Recipe(CFG, prefix="model.", format="bf16", vision=None, shard_bytes=10**9)

Tensors = dict[str, np.ndarray]


def make(path: Path, *, shards: bool = False, **changes) -> Path:
    """Writes the checkpoint; `changes` replace fields of the config, or `prefix` and `vision` of the recipe."""
    recipe_changes = {key: changes.pop(key) for key in ("prefix", "vision") if key in changes}
    recipe = dataclasses.replace(RECIPE, cfg=dataclasses.replace(CFG, **changes), **recipe_changes)
    if shards:
        recipe = dataclasses.replace(recipe, shard_bytes=25_000)
    write(path, recipe)
    return path


def read(path: Path) -> Tensors:
    """All tensors of a directory."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def edit(path: Path, change: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    """Rewrites one file after `change` has worked on its tensors."""
    tensors = load_file(path / file)
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path / file, {"format": "pt"})


def edit_header(path: Path, change: Callable[[dict], object], file: str = "model.safetensors") -> None:
    """Rewrites the header of one file and leaves the tensor bytes as they are."""
    raw = (path / file).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (path / file).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def edit_json(path: Path, change: Callable[[dict], object], file: str = "config.json") -> None:
    value = json.loads((path / file).read_text())
    change(value)
    (path / file).write_text(json.dumps(value))


def edit_index(path: Path, change: Callable[[dict], object]) -> None:
    edit_json(path, lambda index: change(index["weight_map"]), INDEX)


def assert_same(got, want) -> None:
    """Two pytrees are equal bit for bit, dtypes included, in whichever layout their integers are."""
    got, want = (jax.tree.map(in_rows, tree, is_leaf=is_quantised) for tree in (got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, jax.tree_util.keystr(path)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
