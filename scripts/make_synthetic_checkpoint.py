"""Writes a checkpoint of random weights with the names, shapes, dtypes and files of a published Qwen3.8-27B.

    python scripts/make_synthetic_checkpoint.py --like qwen3.8-27b-w4a16 /tmp/w4a16 --scale small

For speed and memory measurements at full size, and for tests scaled down. Logits are finite and activations keep
their size through the layers, but the text such a model writes means nothing.
"""

import argparse
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.write import (
    NewTensor,
    copy_tokenizer,
    natural_order,
    new_directory,
    plan_shards,
    write_json,
    write_shards,
)
from qwen38_jax.config import ModelConfig

LIKE = ("qwen3.8-27b", "qwen3.8-27b-w4a16", "tiny")
SCALES = ("full", "small")

# The published config.json.
FULL = ModelConfig(
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    linear_per_group=3,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    rotary_dim=64,
    rope_theta=1e7,
    mrope_section=(11, 11, 10),
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    mtp_num_hidden_layers=1,
    max_position_embeddings=262144,
    initializer_range=0.02,
    eos_token_ids=(248044,),
    dtype="bfloat16",
)
# The same ratios of heads, and inputs of every quantised matrix in whole groups.
SMALL = dataclasses.replace(
    FULL,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=1,
    head_dim=64,
    rotary_dim=16,
    mrope_section=(3, 3, 2),
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    max_position_embeddings=4096,
    eos_token_ids=(0,),
)

GROUP = 128  # weights that share a scale
# Leaves of `Params` that the W4A16 checkpoint stores in 4 bits; in_proj_a and in_proj_b are too small to be.
_QUANTISED = {"gate", "up", "down", "q", "k", "v", "o", "qkv", "z", "out"}
_RMS_CODE = math.sqrt(sum(code * code for code in range(-8, 8)) / 16)

_BLOCK = 1 << 22  # normals drawn once; tensors are pieces of it


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What to write. `vision` holds depth, hidden size and MLP size of the vision tower, or is None."""

    cfg: ModelConfig
    prefix: str
    quantised: bool
    vision: tuple[int, int, int] | None
    shard_bytes: int


def recipe(
    like: str,
    *,
    scale: str | None = None,
    layers: int | None = None,
    vocab: int | None = None,
    vision: bool = True,
) -> Recipe:
    """The recipe for one of `LIKE`; `scale` is `full` unless said otherwise (`tiny` is always small).

    Raises:
      ValueError: an unknown name or scale, or sizes that make no model.
    """
    scale = scale or ("small" if like == "tiny" else "full")
    if like not in LIKE or scale not in SCALES or (like, scale) == ("tiny", "full"):
        raise ValueError(
            f"no synthetic checkpoint like {like!r} at scale {scale!r}; known: {LIKE}, {SCALES}, tiny only small"
        )
    small, quantised = scale == "small", like.endswith("w4a16")
    cfg = SMALL if small else FULL
    changes = {"num_hidden_layers": layers, "vocab_size": vocab, "dtype": "float32" if like == "tiny" else None}
    if vocab is not None and vocab < FULL.vocab_size:
        changes["eos_token_ids"] = (0,)
    cfg = dataclasses.replace(cfg, **{key: value for key, value in changes.items() if value is not None})
    if like == "tiny":
        return Recipe(cfg, prefix="model.", quantised=False, vision=None, shard_bytes=10**9)
    # Full size: as many shards as the published checkpoint has.
    shard_bytes = 10**6 if small else 2_990_000_000 if quantised else 3_350_000_000
    tower = (2, 64, 128) if small else (27, 1152, 4304)
    return Recipe(cfg, "model.language_model.", quantised, tower if vision else None, shard_bytes)


def plan(recipe: Recipe, seed: int = 0) -> dict[str, list[NewTensor]]:
    """File name -> the tensors in it. Values follow from the seed and each tensor's name alone."""
    cfg, draw = recipe.cfg, functools.partial(_Draw, _normals(seed), seed)
    tensors: list[NewTensor] = []
    for place in names.places(cfg):
        for canonical in place.names:
            name = names.spell(canonical, recipe.prefix)
            if recipe.quantised and place.stacked and place.path.rpartition(".")[2] in _QUANTISED:
                tensors += _packed(name.removesuffix(".weight"), place.shape, draw)
            else:
                tensors.append(_dense(name, cfg.dtype, place.shape, draw))
    for name, shape in _vision_shapes(recipe, cfg.hidden_size).items():
        tensors.append(_dense(name, cfg.dtype, shape, draw))
    tensors.sort(key=lambda tensor: (_position(tensor.name), natural_order(tensor.name)))
    if not recipe.quantised:
        return plan_shards(tensors, recipe.shard_bytes)
    # The quantiser carries the MTP head over as it is, in a file of its own.
    body = [tensor for tensor in tensors if names.parse(tensor.name).kind != "mtp"]
    mtp = [tensor for tensor in tensors if names.parse(tensor.name).kind == "mtp"]
    return {**plan_shards(body, recipe.shard_bytes), "model_extra_tensors.safetensors": mtp}


def _position(name: str) -> int:
    """Layers, norm and vision first, then the embedding, the head, and the MTP head."""
    order = ("embed", "head", "mtp")
    kind = names.layer_class(names.parse(name))
    return order.index(kind) + 1 if kind in order else 0


def write(destination: str | Path, recipe: Recipe, *, seed: int = 0, tokenizer: str | Path | None = None) -> None:
    """Writes the checkpoint; nothing stands at `destination` until all of it does.

    Raises:
      CheckpointError: `destination` is taken, the disk is too small, or `tokenizer` has no tokenizer.json.
    """
    files = plan(recipe, seed)
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    with new_directory(destination) as partial, tqdm(total=total, unit="B", unit_scale=True) as progress:
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), partial)
        write_json(partial / "config.json", hf_config(recipe))
        write_json(partial / "generation_config.json", _generation_config(recipe.cfg))
        write_shards(partial, {file: [_counted(t, progress) for t in tensors] for file, tensors in files.items()})


def hf_config(recipe: Recipe) -> dict[str, Any]:
    """config.json: text-only, or the multimodal form around it."""
    config = recipe.cfg.to_hf()
    if recipe.prefix != "model.":
        text = {key: value for key, value in config.items() if key != "architectures"}
        depth, hidden, inner = recipe.vision or (27, 1152, 4304)
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": recipe.cfg.dtype,
            "tie_word_embeddings": recipe.cfg.tie_word_embeddings,
            "text_config": {**text, "mamba_ssm_dtype": "float32"},
            "vision_config": {
                "model_type": "qwen3_5_vision",
                "depth": depth,
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_heads": 16,
                "in_channels": 3,
                "patch_size": 16,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "num_position_embeddings": 2304,
                "out_hidden_size": recipe.cfg.hidden_size,
                "deepstack_visual_indexes": [],
                "hidden_act": "gelu_pytorch_tanh",
            },
        }
    if recipe.quantised:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
        group = {"format": "pack-quantized", "targets": ["Linear"], "weights": weights}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*visual.*", "re:.*linear_attn.in_proj_[ab]"],
        }
    return config


def _generation_config(cfg: ModelConfig) -> dict[str, Any]:
    stop_ids = [248046, 248044] if cfg.vocab_size > 248046 else [1, 0]
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    return {**sampling, "eos_token_id": stop_ids, "pad_token_id": stop_ids[1]}


def _vision_shapes(recipe: Recipe, out: int) -> dict[str, tuple[int, ...]]:
    """The vision tower: patches of 2 x 16 x 16, pre-norm blocks with biases, a merger of 2 x 2 patches."""
    if recipe.vision is None:
        return {}
    depth, hidden, inner = recipe.vision
    merged = 4 * hidden
    linears = {
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (out, merged),
        "patch_embed.proj": (hidden, 3, 2, 16, 16),
    }
    norms = {"merger.norm": hidden}
    for block in (f"blocks.{i}" for i in range(depth)):
        linears[f"{block}.attn.qkv"] = (3 * hidden, hidden)
        linears[f"{block}.attn.proj"] = (hidden, hidden)
        linears[f"{block}.mlp.linear_fc1"] = (inner, hidden)
        linears[f"{block}.mlp.linear_fc2"] = (hidden, inner)
        norms[f"{block}.norm1"] = norms[f"{block}.norm2"] = hidden
    shapes = {"pos_embed.weight": (2304, hidden)}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": (shape[0],) for name, shape in linears.items()}
    shapes |= {f"{name}.{part}": (size,) for name, size in norms.items() for part in ("weight", "bias")}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def _dense(name: str, dtype: str, shape: tuple[int, ...], draw: Callable[[str], "_Draw"]) -> NewTensor:
    def rows() -> Iterator[np.ndarray]:
        random = draw(name)
        if name.endswith("A_log"):
            yield np.log(random.uniform(0.05, 8.0, shape)).astype(dtype)
        elif name.endswith("dt_bias"):
            yield random.uniform(-5.0, 1.0, shape).astype(dtype)
        elif len(shape) == 1:
            plain = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0  # the others are zero-centred
            yield (plain + 0.05 * random.normal(shape)).astype(dtype)
        else:
            # Unit inputs give unit outputs: neither activations nor logits grow with the width.
            std = math.prod(shape[1:]) ** -0.5
            for part in random.parts(shape):
                yield (std * random.normal(part)).astype(dtype)

    return NewTensor(name, dtype, shape, rows)


def _packed(module: str, shape: tuple[int, int], draw: Callable[[str], "_Draw"]) -> list[NewTensor]:
    """A 4-bit matrix [N, K]: codes -8..7 stored as code + 8, eight to a word; half of the scales are negative."""
    n, k = shape
    packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"

    def words() -> Iterator[np.ndarray]:
        random = draw(packed)
        for part in random.parts((n, k // 8)):
            yield random.words(part)

    def scales() -> Iterator[np.ndarray]:
        random = draw(scale)
        size = np.exp(0.2 * random.normal((n, k // GROUP))) / (_RMS_CODE * math.sqrt(k))
        yield (size * random.signs(size.shape)).astype(np.float16)

    return [
        NewTensor(packed, "int32", (n, k // 8), words),
        NewTensor(scale, "float16", (n, k // GROUP), scales),
        NewTensor(f"{module}.weight_shape", "int64", (2,), lambda: [np.array(shape, np.int64)]),
    ]


@functools.cache
def _normals(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32)


class _Draw:
    """Random numbers for one tensor. Normals are cut from a shared block, which is as fast as copying."""

    def __init__(self, block: np.ndarray, seed: int, name: str):
        self._block = block
        self._rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.uniform = self._rng.uniform

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        n = math.prod(shape)
        start = int(self._rng.integers(len(self._block) - n + 1))
        return self._block[start : start + n].reshape(shape)

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.integers(-(1 << 31), 1 << 31, shape, dtype=np.int32)

    def signs(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.choice(np.array([-1.0, 1.0], np.float32), shape)

    @staticmethod
    def parts(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Shapes of consecutive rows, each part of at most half a block."""
        rows, width = shape[0], math.prod(shape[1:])
        step = max(1, _BLOCK // (2 * width))
        for start in range(0, rows, step):
            yield (min(step, rows - start), *shape[1:])


def _counted(tensor: NewTensor, progress: tqdm) -> NewTensor:
    def rows() -> Iterator[np.ndarray]:
        for array in tensor.rows():
            yield array
            progress.update(array.nbytes)

    return dataclasses.replace(tensor, rows=rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", metavar="DST", help="a new or empty directory")
    parser.add_argument("--like", choices=LIKE, required=True, help="tiny: text only, small, fp32")
    parser.add_argument("--scale", choices=SCALES, help="default: full (55.6 GB in bf16, 19.5 GB in W4A16), tiny small")
    parser.add_argument("--layers", type=int, help="text layers, a multiple of 4")
    parser.add_argument("--vocab", type=int, help="rows of the embedding and of the head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-vision", action="store_true", help="leave the vision tower out (default: written)")
    parser.add_argument("--tokenizer", metavar="DIR", help="copy tokenizer and chat template from here")
    args = parser.parse_args(argv)
    try:
        chosen = recipe(args.like, scale=args.scale, layers=args.layers, vocab=args.vocab, vision=not args.no_vision)
        write(args.destination, chosen, seed=args.seed, tokenizer=args.tokenizer)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
