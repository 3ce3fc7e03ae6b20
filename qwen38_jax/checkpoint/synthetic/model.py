"""Random checkpoints with the names, shapes, dtypes and files of a published Qwen3.8-27B."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from qwen38_jax.checkpoint import names
from qwen38_jax.checkpoint.formats import FP8_BLOCK
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.synthetic import tensors
from qwen38_jax.checkpoint.synthetic.tensors import GROUP
from qwen38_jax.checkpoint.write import NewTensor, natural_order, plan_shards
from qwen38_jax.config import ModelConfig

FORMATS = ("bf16", "w4a16", "fast", "gptq", "gptq-act-order", "fp8")

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

# Leaves of a layer that quantised checkpoints store in 4 or 8 bits; in_proj_a and in_proj_b are too small to be.
_QUANTISED = {"gate_up", "down", "qkv", "o", "qkvz", "out"}


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


def stored_as(format: str, cfg: ModelConfig) -> Recipe:
    """The text model of `cfg` in one of `FORMATS`, in a single file (FP8: in one a layer)."""
    return Recipe(cfg, prefix="model.", format=format, vision=None, shard_bytes=1 << 50)


def files(recipe: Recipe, seed: int) -> dict[str, list[NewTensor]]:
    """File name -> the tensors in it."""
    cfg = recipe.cfg
    places = names.places(cfg)
    if recipe.format == "fast":
        places.append(names.draft_place(cfg, draft_rows(cfg)))
    new: list[NewTensor] = []
    for place in places:
        make = _maker(recipe, place)
        for part in place.slices:
            for canonical in part.names:
                new += make(names.spell(canonical, recipe.prefix), part.shape, seed)
    for name, shape in _vision_shapes(recipe, cfg.hidden_size).items():
        new += tensors.dense(name, shape, seed, cfg.dtype)
    new.sort(key=lambda tensor: (_position(tensor.name), natural_order(tensor.name)))
    if recipe.format == "fp8":
        return _files_by_layer(new)
    if recipe.format not in ("w4a16", "fast"):
        return plan_shards(new, recipe.shard_bytes)
    # The quantiser carries the MTP head over as it is, in a file of its own.
    body = [tensor for tensor in new if names.parse(tensor.name).kind != "mtp"]
    mtp = [tensor for tensor in new if names.parse(tensor.name).kind == "mtp"]
    return {**plan_shards(body, recipe.shard_bytes), "model_extra_tensors.safetensors": mtp}


def draft_rows(cfg: ModelConfig) -> int:
    """Rows of the draft head that format `fast` brings."""
    return min(40960, cfg.vocab_size // 4)


def _maker(recipe: Recipe, place: Place) -> Callable[..., list[NewTensor]]:
    """What makes the tensors of one weight, called with its name, its shape and the seed."""
    leaf = place.path.rpartition(".")[2]
    body = place.stacked and leaf in _QUANTISED
    mtp = place.path.startswith("mtp.") and leaf in _QUANTISED
    if recipe.format == "fp8" and (body or mtp):
        return tensors.fp8
    if recipe.format == "fast" and place.path == "embed":
        return functools.partial(tensors.packed, bits=8, scale_dtype="bfloat16")
    if recipe.format == "fast" and (body or mtp or place.path in ("mtp.fc", "lm_head", "draft_head")):
        return tensors.packed
    if recipe.format == "w4a16" and body:
        return tensors.packed
    if recipe.format.startswith("gptq") and body:
        return functools.partial(tensors.gptq, act_order=recipe.format.endswith("act-order"))
    return functools.partial(_floats(place), dtype=recipe.cfg.dtype)


def _floats(place: Place) -> Callable[..., list[NewTensor]]:
    """What makes a tensor of floats, so that decay and gates are of a trained model's size."""
    leaf = place.path.rpartition(".")[2]
    if leaf == "A_log":
        return functools.partial(tensors.log_uniform, low=0.05, high=8.0)
    if leaf == "dt_bias":
        return functools.partial(tensors.uniform, low=-5.0, high=1.0)
    if place.path == "linear.mixer.norm":  # the other norms are zero-centred
        return functools.partial(tensors.dense, mean=1.0)
    return tensors.dense


def _files_by_layer(new: list[NewTensor]) -> dict[str, list[NewTensor]]:
    """The files of the FP8 checkpoint: one for each layer, one for the MTP head, one for all else."""
    found: dict[str, list[NewTensor]] = {}
    for tensor in new:
        parsed = names.parse(tensor.name)
        layer = parsed.canonical.split(".")[1] if parsed.canonical.startswith("layers.") else None
        file = f"layers-{layer}" if layer else "mtp" if parsed.kind == "mtp" else "outside"
        found.setdefault(f"{file}.safetensors", []).append(tensor)
    return found


def _position(name: str) -> int:
    """Layers, norm and vision first, then the embedding, the head, and the MTP head."""
    order = ("embed", "head", "mtp")
    kind = names.layer_class(names.parse(name))
    return order.index(kind) + 1 if kind in order else 0


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
    ignore = ["re:.*visual.*", "re:.*linear_attn.in_proj_[ab]"]
    if stored == "fast":
        return tensors.packed_config({"Linear": 4, "lm_head": 4, "embed_tokens": 8, "re:^mtp": 4}, ignore)
    return tensors.packed_config({"Linear": 4}, ["lm_head", *ignore])


def generation_config(cfg: ModelConfig) -> dict[str, Any]:
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
