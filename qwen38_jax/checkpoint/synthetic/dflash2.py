"""Random DFlash2 drafters with the names, shapes, dtypes and config.json of the published one for Qwen3.8-27B."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from qwen38_jax.checkpoint.drafter import drafter_places
from qwen38_jax.checkpoint.names import Place
from qwen38_jax.checkpoint.synthetic import tensors
from qwen38_jax.checkpoint.write import NewTensor, natural_order, plan_shards
from qwen38_jax.config import DFlash2Config

FORMATS = ("bf16", "w4a16")

# The published config.json.
FULL = DFlash2Config(
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    sliding_window=2048,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    max_position_embeddings=262144,
    num_target_layers=64,
    target_layer_ids=(5, 19, 33, 47, 61),
    block_size=8,
    mask_token_id=248070,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
    initializer_range=0.02,
    dtype="bfloat16",
)
# For the small synthetic model, with inputs of every quantised matrix in whole groups.
SMALL = dataclasses.replace(
    FULL,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=64,
    max_position_embeddings=4096,
    num_target_layers=8,
    target_layer_ids=(1, 2, 4, 5, 6),
    mask_token_id=511,
    selector_rank=32,
)


@dataclasses.dataclass(frozen=True)
class DrafterRecipe:
    """What to write; `format` is one of `FORMATS`, where `bf16` stands for `cfg.dtype`, whichever that is."""

    cfg: DFlash2Config
    format: str


def files(recipe: DrafterRecipe, seed: int) -> dict[str, list[NewTensor]]:
    """File name -> the tensors in it."""
    new: list[NewTensor] = []
    for place in drafter_places(recipe.cfg):
        make = _maker(recipe, place)
        for part in place.slices:
            for name in part.names:
                new += make(name, part.shape, seed)
    new.sort(key=lambda tensor: natural_order(tensor.name))
    return plan_shards(new, sum(tensor.nbytes for tensor in new))


def _maker(recipe: DrafterRecipe, place: Place) -> Callable[..., list[NewTensor]]:
    """What makes the tensors of one weight, called with its name, its shape and the seed."""
    if recipe.format == "w4a16" and place.path.startswith(("layers.attention.", "layers.mlp.", "fc")):
        if len(place.shape) == 2:
            return tensors.packed
    floats = functools.partial(tensors.dense, dtype=recipe.cfg.dtype)
    if place.path.endswith("norm"):  # their weights are plain
        return functools.partial(floats, mean=1.0)
    if place.path.endswith("conv.base"):  # a few rows mixed
        return functools.partial(floats, mean=0.5, std=0.05)
    if place.path.endswith("conv.projection"):  # small beside `base`
        return functools.partial(floats, std=0.1 * recipe.cfg.hidden_size**-0.5)
    if place.path.endswith("cessors"):  # so that a score, the sum of `rank` products of three, is of size 1
        return functools.partial(floats, std=recipe.cfg.selector_rank**-0.25)
    return floats


def hf_config(recipe: DrafterRecipe) -> dict[str, Any]:
    """config.json."""
    config = recipe.cfg.to_hf()
    if recipe.format == "w4a16":
        ignore = ["re:.*kernel_projection", "re:.*candidate_selector.*"]
        config["quantization_config"] = tensors.packed_config({"Linear": 4}, ignore)
    return config
