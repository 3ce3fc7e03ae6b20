"""Writes a checkpoint of random weights with the names, shapes, dtypes and files of a published Qwen3.8-27B.

    python scripts/make_synthetic_checkpoint.py --like qwen3.8-27b-w4a16 /tmp/w4a16 --scale small

`w4a16` is compressed-tensors, symmetric, in groups of 128; `fast` the same with an int4 head, an int8 embedding, an
int4 MTP head and a draft head; `gptq` and `gptq-act-order` (columns in order of importance) GPTQ; `fp8` blocks of
128 x 128.

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
from qwen38_jax.checkpoint.draft_ids import DRAFT_IDS, write_draft_ids
from qwen38_jax.checkpoint.formats import FP8_BLOCK
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
from qwen38_jax.config import ModelConfig

FORMATS = ("bf16", "w4a16", "fast", "gptq", "gptq-act-order", "fp8")
LIKE = ("qwen3.8-27b", *(f"qwen3.8-27b-{name}" for name in FORMATS[1:]), "tiny")
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
# Leaves of a layer that quantised checkpoints store in 4 or 8 bits; in_proj_a and in_proj_b are too small to be.
_QUANTISED = {"gate_up", "down", "qkv", "o", "qkvz", "out"}
_RMS_CODE = {bits: math.sqrt(np.mean(np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) ** 2)) for bits in (4, 8)}
_RMS_FP8 = 64.0  # of FP8 values before scaling; their largest is 448
_GPTQ_SYMMETRIC = 0x77777777  # eight zero points of 8, stored less 1

_BLOCK = 1 << 22  # normals drawn once; tensors are pieces of it


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What to write.

    Attributes:
      format: one of `FORMATS`; `bf16` stands for `cfg.dtype`, whichever that is.
      vision: depth, hidden size and MLP size of the vision tower, or None.
    """

    cfg: ModelConfig
    prefix: str
    format: str
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
    small, stored = scale == "small", like.removeprefix("qwen3.8-27b").removeprefix("-") or "bf16"
    cfg = SMALL if small else FULL
    changes = {"num_hidden_layers": layers, "vocab_size": vocab, "dtype": "float32" if like == "tiny" else None}
    if vocab is not None and vocab < FULL.vocab_size:
        changes["eos_token_ids"] = (0,)
    cfg = dataclasses.replace(cfg, **{key: value for key, value in changes.items() if value is not None})
    if like == "tiny":
        return Recipe(cfg, prefix="model.", format="bf16", vision=None, shard_bytes=10**9)
    # Full size: as many shards as the published checkpoint has.
    shard_bytes = 10**6 if small else 3_350_000_000 if stored == "bf16" else 2_990_000_000
    tower = (2, 64, 128) if small else (27, 1152, 4304)
    return Recipe(cfg, "model.language_model.", stored, tower if vision else None, shard_bytes)


def plan(recipe: Recipe, seed: int = 0) -> dict[str, list[NewTensor]]:
    """File name -> the tensors in it. Values follow from the seed and each tensor's name alone."""
    cfg, draw = recipe.cfg, functools.partial(_Draw, _normals(seed), seed)
    places = names.places(cfg)
    if recipe.format == "fast":
        places.append(names.draft_place(cfg, _draft_rows(cfg)))
    tensors: list[NewTensor] = []
    for place in places:
        make = _maker(recipe, place)
        for part in place.slices:
            for canonical in part.names:
                tensors += make(names.spell(canonical, recipe.prefix), part.shape, draw)
    for name, shape in _vision_shapes(recipe, cfg.hidden_size).items():
        tensors += _dense(name, shape, draw, cfg.dtype)
    tensors.sort(key=lambda tensor: (_position(tensor.name), natural_order(tensor.name)))
    if recipe.format == "fp8":
        return _files_by_layer(tensors)
    if recipe.format not in ("w4a16", "fast"):
        return plan_shards(tensors, recipe.shard_bytes)
    # The quantiser carries the MTP head over as it is, in a file of its own.
    body = [tensor for tensor in tensors if names.parse(tensor.name).kind != "mtp"]
    mtp = [tensor for tensor in tensors if names.parse(tensor.name).kind == "mtp"]
    return {**plan_shards(body, recipe.shard_bytes), "model_extra_tensors.safetensors": mtp}


def _draft_rows(cfg: ModelConfig) -> int:
    return min(40960, cfg.vocab_size // 4)


def _maker(recipe: Recipe, place: Place) -> Callable[..., list[NewTensor]]:
    """What makes the tensors of one weight, called with its name, its shape and the random numbers."""
    leaf = place.path.rpartition(".")[2]
    body = place.stacked and leaf in _QUANTISED
    mtp = place.path.startswith("mtp.") and leaf in _QUANTISED
    if recipe.format == "fp8" and (body or mtp):
        return _fp8
    if recipe.format == "fast" and place.path == "embed":
        return functools.partial(_packed, bits=8, scale_dtype="bfloat16")
    if recipe.format == "fast" and (body or mtp or place.path in ("mtp.fc", "lm_head", "draft_head")):
        return _packed
    if recipe.format == "w4a16" and body:
        return _packed
    if recipe.format.startswith("gptq") and body:
        return functools.partial(_gptq, act_order=recipe.format.endswith("act-order"))
    return functools.partial(_dense, dtype=recipe.cfg.dtype)


def _files_by_layer(tensors: list[NewTensor]) -> dict[str, list[NewTensor]]:
    """The files of the FP8 checkpoint: one for each layer, one for the MTP head, one for all else."""
    files: dict[str, list[NewTensor]] = {}
    for tensor in tensors:
        parsed = names.parse(tensor.name)
        layer = parsed.canonical.split(".")[1] if parsed.canonical.startswith("layers.") else None
        file = f"layers-{layer}" if layer else "mtp" if parsed.kind == "mtp" else "outside"
        files.setdefault(f"{file}.safetensors", []).append(tensor)
    return files


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
        if recipe.format == "fast":
            step = recipe.cfg.vocab_size // _draft_rows(recipe.cfg)
            write_draft_ids(partial / DRAFT_IDS, step * np.arange(_draft_rows(recipe.cfg)))
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
    if recipe.format != "bf16":
        config["quantization_config"] = _quantization_config(recipe.format)
    return config


def _quantization_config(stored: str) -> dict[str, Any]:
    """What published checkpoints of this format say about themselves, true or not."""
    if stored == "fp8":
        return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    if stored.startswith("gptq"):
        order = stored.endswith("act-order")
        method = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": GROUP}
        return {**method, "sym": True, "desc_act": order, "lm_head": False}

    def group(target: str, bits: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
        return {"format": "pack-quantized", "targets": [target], "weights": weights}

    groups = {"group_0": group("Linear", 4)}
    ignore = ["lm_head", "re:.*visual.*", "re:.*linear_attn.in_proj_[ab]"]
    if stored == "fast":
        groups |= {"group_1": group("lm_head", 4), "group_2": group("embed_tokens", 8), "group_3": group("re:^mtp", 4)}
        ignore.remove("lm_head")
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "quantization_status": "compressed",
        "ignore": ignore,
    }


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


def _dense(name: str, shape: tuple[int, ...], draw: Callable[[str], "_Draw"], dtype: str) -> list[NewTensor]:
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

    return [NewTensor(name, dtype, shape, rows)]


def _packed(
    weight: str, shape: tuple[int, int], draw: Callable[[str], "_Draw"], bits: int = 4, scale_dtype: str = "float16"
) -> list[NewTensor]:
    """A matrix [N, K] as compressed-tensors packs it: every code occurs, half of the scales are negative."""
    n, k = shape
    words, scales = (n, k * bits // 32), (n, k // GROUP)
    return [
        _words(f"{weight}_packed", words, draw),
        NewTensor(
            f"{weight}_scale", scale_dtype, scales, _scales(f"{weight}_scale", scales, k, bits, scale_dtype, draw)
        ),
        NewTensor(f"{weight}_shape", "int64", (2,), lambda: [np.array(shape, np.int64)]),
    ]


def _gptq(weight: str, shape: tuple[int, int], draw: Callable[[str], "_Draw"], act_order: bool) -> list[NewTensor]:
    """A matrix [N, K] as GPTQ packs it, transposed, with symmetric codes."""
    (n, k), module = shape, weight.removesuffix("weight")
    groups = k // GROUP

    def g_idx() -> list[np.ndarray]:
        columns = draw(f"{module}g_idx").permutation(k) if act_order else np.arange(k)
        return [(columns // GROUP).astype(np.int32)]

    zeros = np.int32(_GPTQ_SYMMETRIC)
    return [
        _words(f"{module}qweight", (k // 8, n), draw),
        NewTensor(f"{module}qzeros", "int32", (groups, n // 8), lambda: [np.full((groups, n // 8), zeros)]),
        NewTensor(
            f"{module}scales", "float16", (groups, n), _scales(f"{module}scales", (groups, n), k, 4, "float16", draw)
        ),
        NewTensor(f"{module}g_idx", "int32", (k,), g_idx),
    ]


def _words(name: str, shape: tuple[int, int], draw: Callable[[str], "_Draw"]) -> NewTensor:
    """Packed codes: as all of them are to occur, words of random bits."""

    def rows() -> Iterator[np.ndarray]:
        random = draw(name)
        for part in random.parts(shape):
            yield random.words(part)

    return NewTensor(name, "int32", shape, rows)


def _scales(
    name: str, shape: tuple[int, int], k: int, bits: int, dtype: str, draw: Callable[[str], "_Draw"]
) -> Callable[[], Iterator[np.ndarray]]:
    """Scales that give weights of K columns the size of dense ones, with random signs."""

    def rows() -> Iterator[np.ndarray]:
        random = draw(name)
        for part in random.parts(shape):
            size = np.exp(0.2 * random.normal(part)) / (_RMS_CODE[bits] * math.sqrt(k))
            yield (size * random.signs(part)).astype(dtype)

    return rows


def _fp8(weight: str, shape: tuple[int, int], draw: Callable[[str], "_Draw"]) -> list[NewTensor]:
    """A matrix [N, K] of FP8 values with a scale for each block."""
    blocks = tuple(-(-size // FP8_BLOCK) for size in shape)

    def values() -> Iterator[np.ndarray]:
        random = draw(weight)
        for part in random.parts(shape):
            yield random.fp8(part)

    def scales() -> Iterator[np.ndarray]:
        size = np.exp(0.2 * draw(f"{weight}_scale_inv").normal(blocks)) / (_RMS_FP8 * math.sqrt(shape[1]))
        yield size.astype("bfloat16")

    return [
        NewTensor(weight, "float8_e4m3fn", shape, values),
        NewTensor(f"{weight}_scale_inv", "bfloat16", blocks, scales),
    ]


@functools.cache
def _normals(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32)


@functools.cache
def _fp8_normals(seed: int) -> np.ndarray:
    return np.clip(_RMS_FP8 * _normals(seed), -448, 448).astype("float8_e4m3fn")


class _Draw:
    """Random numbers for one tensor. Normals are cut from a shared block, which is as fast as copying."""

    def __init__(self, block: np.ndarray, seed: int, name: str):
        self._block, self._seed = block, seed
        self._rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.uniform, self.permutation = self._rng.uniform, self._rng.permutation

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._cut(self._block, shape)

    def fp8(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._cut(_fp8_normals(self._seed), shape)

    def _cut(self, block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        n = math.prod(shape)
        start = int(self._rng.integers(len(block) - n + 1))
        return block[start : start + n].reshape(shape)

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
    parser.add_argument(
        "--scale", choices=SCALES, help="default: full (55.6 GB in bf16, 19.5 GB in W4A16), tiny is small"
    )
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
