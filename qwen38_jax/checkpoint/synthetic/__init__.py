"""Checkpoints of random weights that are stored as published ones are, at full size or scaled down.

For measurements of speed and memory, and for tests. Activations keep their size through the layers and logits are
finite, but the text such a model writes means nothing.
"""

from qwen38_jax.checkpoint.synthetic.dflash2 import DrafterRecipe
from qwen38_jax.checkpoint.synthetic.model import FORMATS, FULL, SMALL, Recipe, stored_as
from qwen38_jax.checkpoint.synthetic.tensors import GROUP
from qwen38_jax.checkpoint.synthetic.write import (
    DRAFTERS,
    LIKE,
    MODELS,
    SCALES,
    account,
    hf_config,
    plan,
    recipe,
    write,
)

__all__ = [
    "DRAFTERS",
    "FORMATS",
    "FULL",
    "GROUP",
    "LIKE",
    "MODELS",
    "SCALES",
    "SMALL",
    "DrafterRecipe",
    "Recipe",
    "account",
    "hf_config",
    "plan",
    "recipe",
    "stored_as",
    "write",
]
