"""Hugging Face checkpoints: load, export, inspect."""

from qwen38_jax.checkpoint.drafter import load_drafter
from qwen38_jax.checkpoint.export import export_checkpoint, export_drafter
from qwen38_jax.checkpoint.files import CheckpointError, require_tokenizer
from qwen38_jax.checkpoint.inspect import Description, describe, format_description
from qwen38_jax.checkpoint.load import Checkpoint, load_checkpoint, loaded_bytes

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Description",
    "describe",
    "export_checkpoint",
    "export_drafter",
    "format_description",
    "load_checkpoint",
    "load_drafter",
    "loaded_bytes",
    "require_tokenizer",
]
