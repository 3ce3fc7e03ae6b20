"""Qwen3.8-27B in functional JAX. Importing this package imports no jax: the command line answers at once."""

__version__ = "0.1.0"

_PUBLIC = {
    "ModelConfig": "qwen38_jax.config",
    "Engine": "qwen38_jax.engine",
    "Request": "qwen38_jax.engine",
    "Completion": "qwen38_jax.engine",
    "SamplingParams": "qwen38_jax.sampling",
    "load_checkpoint": "qwen38_jax.checkpoint",
    "export_checkpoint": "qwen38_jax.checkpoint",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qwen38_jax' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
