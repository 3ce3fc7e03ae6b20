"""Runs one test over every way to compute an operation."""

import functools

import jax
import numpy as np
import pytest

# On a GPU an interpreted kernel must agree too.
IMPLEMENTATIONS = (
    "reference",
    "interpret",
    pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")]),
)

# Options for programs of up to thousands of small operations that run once: compiling them is what takes long.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
if COMPILE_QUICKLY and jax.__version_info__ < (0, 11):  # later versions do not know it
    COMPILE_QUICKLY["xla_cpu_use_fusion_emitters"] = False


def implementation(name, kernel, reference, **options):
    """The operation as one jitted function of arrays; `options` are the kernel's alone, such as its config."""
    function = reference if name == "reference" else functools.partial(kernel, **options, interpret=name == "interpret")
    return jax.jit(function, compiler_options=COMPILE_QUICKLY)


def relative_rms(actual, expected) -> float:
    """Of the error, relative to that of `expected`; not a number if anything is not."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))
