"""Whether a layer is computed by its Pallas kernel."""

import jax
import jax.numpy as jnp


def takes_kernels(mode: str, dtype: jnp.dtype) -> bool:
    """Whether `mode`, a `ModelConfig.kernels`, means the kernels here, for activations of `dtype`."""
    half = jnp.dtype(dtype).itemsize == 2
    return mode == "interpret" or (mode == "auto" and half and jax.default_backend() == "gpu")
