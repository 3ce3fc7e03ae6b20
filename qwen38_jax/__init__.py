"""Qwen3.8-27B in functional JAX. Importing this package imports no jax: the command line answers at once."""

import importlib
import os
import sys
from pathlib import Path

__version__ = "0.1.0"

_PUBLIC = {
    "Completion": "qwen38_jax.engine",
    "Engine": "qwen38_jax.engine",
    "ModelConfig": "qwen38_jax.config",
    "Request": "qwen38_jax.engine",
    "SamplingParams": "qwen38_jax.sampling_params",
    "export_checkpoint": "qwen38_jax.checkpoint",
    "load_checkpoint": "qwen38_jax.checkpoint",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qwen38_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def _keep_compiled_programs() -> None:
    """Turns on JAX's persistent compilation cache, in the user's cache directory, unless they have set one up.

    A 64-layer step takes tens of seconds to compile and is the same in every run. JAX_COMPILATION_CACHE_DIR names
    another place; JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return
    settings = {
        "jax_compilation_cache_dir": str(cache / "qwen38_jax" / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    if "jax" not in sys.modules:
        for name, value in settings.items():
            os.environ.setdefault(name.upper(), str(value))
    elif sys.modules["jax"].config.jax_compilation_cache_dir is None:  # too late for the environment
        for name, value in settings.items():
            sys.modules["jax"].config.update(name, value)


_keep_compiled_programs()
