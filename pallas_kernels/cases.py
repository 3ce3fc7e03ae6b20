"""Every kernel at the sizes it is made for: what the benchmark times and the compile check compiles."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import int4_matmul as int4
from pallas_kernels import int8_matmul as int8
from pallas_kernels.device import Device
from pallas_kernels.shapes import BATCH_ROWS, MATMULS, VERIFY_ROWS, Matmul

Array = jax.Array

GROUP = 128  # columns that share a scale
# How many layers to stack, given how many the model has and the bytes that a call reads of one.
Layers = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size.

    Attributes:
      kernel, shape, rows: what a table calls it.
      layers: of which each call takes one.
      make: random arguments from a key; what is stacked has `layers` of them.
      function: of the arguments and, last, of the layer.
      reference: the same in plain JAX.
      nbytes: that a call must read and write at the least.
      operations: multiplications and additions of a call.
      tolerance: relative rms of the difference between function and reference.
      together: whether the kernel's schedule wants all its programs to run at once.
    """

    kernel: str
    shape: str
    rows: int
    layers: int
    make: Callable[[Array], tuple[Any, ...]]
    function: Callable[..., Any]
    reference: Callable[..., Any]
    nbytes: int
    operations: int
    tolerance: float
    together: bool

    @property
    def name(self) -> str:
        return f"{self.kernel}_{self.shape}_{self.rows}"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(self.make, jax.random.key(0))


def all_cases(device: Device, layers: Layers = lambda layers, nbytes: layers) -> Iterator[Case]:
    """Cases with the configs that are chosen for `device`; by default with as many layers as the model has."""
    for bits, activation_bits in ((4, 16), (4, 8), (8, 16), (8, 8)):
        for shape in MATMULS:
            for rows in VERIFY_ROWS if activation_bits == 16 else BATCH_ROWS:
                yield _packed_matmul(bits, activation_bits, shape, rows, device, layers)


def _packed_matmul(bits: int, activation_bits: int, shape: Matmul, rows: int, device: Device, layers: Layers) -> Case:
    module = int4 if bits == 4 else int8
    pack, multiply, reference = (
        (int4.pack_int4, int4.int4_matmul, int4.int4_matmul_reference)
        if bits == 4
        else (int8.pack_int8, int8.int8_matmul, int8.int8_matmul_reference)
    )
    n, k = shape.n, shape.k
    weight_bytes = n * k * bits // 8 + n * k // GROUP * 2
    stack = layers(shape.layers, weight_bytes)

    def make(key):
        keys = jax.random.split(key, 3)
        codes = jax.random.bits(keys[0], (stack, n, k * bits // 8), jnp.uint8)
        scales = jax.random.uniform(keys[1], (stack, n, k // GROUP), jnp.bfloat16, -0.02, 0.02)
        return jax.random.normal(keys[2], (rows, k), jnp.bfloat16), pack(codes, scales)

    config = module.heuristics((rows, n, k), activation_bits, device)
    return Case(
        f"w{bits}a{activation_bits}",
        shape.name,
        rows,
        stack,
        make,
        functools.partial(multiply, activation_bits=activation_bits, config=config),
        functools.partial(reference, activation_bits=activation_bits),
        nbytes=weight_bytes + 2 * rows * (n + k),
        operations=2 * rows * n * k,
        tolerance=4e-3,  # of rounding the result to bf16
        together=True,
    )
