"""The only place that knows how a kernel reaches the machine.

Kernels are lowered through Triton: the one route that compiles for compute capability 8.6 in every supported JAX
(0.10.2 to 0.12). JAX 0.10.2 takes a call without compiler parameters to Mosaic GPU, which needs Hopper, and later
versions take it to Triton, so the parameters are always given. JAX 0.11 deprecated the route; it warns whenever a
program is lowered, which tells a user of these kernels nothing.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Array = jax.Array

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

_MAX_GRID_YZ = 65_535


def kernel_call(
    kernel: Callable[..., None],
    operands: Sequence[Array],
    out_shape: Any,
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> Any:
    """Runs `kernel(*operand refs, *output refs)` once for each point of the grid.

    Every ref is a whole array in device memory: kernels compute their own addresses and masks.

    Args:
      out_shape: `jax.ShapeDtypeStruct`, or a sequence of them.
      name: what profiles and the compiler's dumps call it.
      aliases: operand index -> output index, for outputs that overwrite an operand.
      interpret: evaluate with JAX operations, on any device and slowly, instead of compiling for a GPU. The kernel
        itself must then use the twins of its instructions (`_instructions`).

    Raises:
      ValueError: the grid or an array has a size that the lowering would get wrong without a word.
    """
    if any(extent > _MAX_GRID_YZ for extent in grid[1:]):
        raise ValueError(f"{name}: grid {grid} has more than {_MAX_GRID_YZ} programs along its second or third axis")
    outputs = [out_shape] if isinstance(out_shape, jax.ShapeDtypeStruct) else list(out_shape)
    for array in (*operands, *outputs):
        _check_offsets(name, array)

    # The function's own name is what the lowering writes into the program.
    def named(*refs):
        kernel(*refs)

    named.__name__ = named.__qualname__ = name
    return pl.pallas_call(
        named,
        out_shape=out_shape,
        grid=grid,
        input_output_aliases=dict(aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)


def _check_offsets(name: str, array: Array | jax.ShapeDtypeStruct) -> None:
    """Offsets in an array of up to 2^32 bytes are signed 32-bit numbers of elements: too few for bytes."""
    size = math.prod(array.shape)
    if 2**31 < size and size * array.dtype.itemsize <= 2**32:
        raise ValueError(
            f"{name}: {array.dtype}{list(array.shape)} has {size} elements: between 2^31 and 2^32 elements of one byte "
            f"cannot be addressed; make the array smaller, or larger than that"
        )
