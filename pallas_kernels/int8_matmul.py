"""Few rows of activations times a matrix of 8-bit integers with a scale for every group of columns: W8A16 and W8A8.

    y[m, n] = sum_k x[m, k] * code[n, k] * scale[n, k // group]

Codes become bf16 or fp16 values exactly, or stay bytes. How it is made fast: `_packed_matmul`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._instructions import bytes_to_16bit
from pallas_kernels._packed_matmul import (
    HALF,
    Config,
    Format,
    Packed,
    choose,
    pack_scales,
    packed_matmul,
    pad_channels,
    reference_matmul,
    select,
    unpack_scales,
)
from pallas_kernels._stream_k import TILES
from pallas_kernels.device import Device

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["words", "scales"], meta_fields=["n", "group", "scale_dtype"]
)
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """A matrix `[n, k]` as `pack_int8` arranges it, or several, stacked along leading axes.

    words: int32 `[..., blocks, k / 64, 4, 2, 128]`, blocks of 64 channels; channels past `n` are zero.
    scales: int32 `[..., blocks, k / group, 8, 4]`, two of `scale_dtype` in each.
    """

    words: Array
    scales: Array
    n: int
    group: int
    scale_dtype: str

    @property
    def k(self) -> int:
        return self.words.shape[-4] * HALF

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.words.shape[:-5]


@jax.jit
def pack_int8(codes: Array, scales: Array) -> Int8Weight:
    """Arranges a matrix for `int8_matmul`. The inverse is `unpack_int8`.

    A unit, 64 channels by 64 columns, is 4 x 2 arrays of 128 words: [r, q] holds columns 32 q to 32 q + 31 of
    channels 16 r to 16 r + 15, in the order of the tensor cores' A operand (`_instructions`). Word j of lane (g, t),
    the one at 16 g + 4 t + j, is

        bits      31..24  23..16  15..8   7..0
        channel   g + 8 (j % 2)                    with
        column    c + 3   c + 1   c + 2   c        c = 8 t + 4 (j // 2)

    as signed bytes: `_packed_matmul` says why in this order.

    Args:
      codes: uint8 `[..., N, K]`, each a code plus 128.
      scales: fp16 or bf16 `[..., N, K / group]`, of either sign; `[..., N, 1]` for one scale a channel.

    Raises:
      ValueError: shapes or dtypes are not these, or group is not a multiple of 64.
    """
    *stack, n, k = codes.shape
    if codes.dtype != jnp.uint8 or k % HALF or not n * k:
        raise ValueError(
            f"codes must be uint8 [..., N, K] with K a multiple of {HALF}, got {codes.dtype}{list(codes.shape)}"
        )
    if scales.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"scales must be float16 or bfloat16, got {scales.dtype}; cast them")
    groups = scales.shape[-1]
    if list(scales.shape[:-1]) != [*stack, n] or not groups or k % (HALF * groups):
        raise ValueError(
            f"scales must be {[*stack, n, 'groups']} for these codes, for groups of a multiple of {HALF} columns; "
            f"got {list(scales.shape)}"
        )
    codes = pad_channels(codes, 0x80) ^ 0x80
    # channel: block, r, + 8, g; column: unit, q, t, j // 2, + 2, + 1
    codes = codes.reshape(-1, TILES, 2, 8, k // HALF, 2, 4, 2, 2, 2).transpose(0, 4, 1, 5, 3, 6, 7, 2, 9, 8)
    words = lax.bitcast_convert_type(codes.reshape(*stack, -1, k // HALF, TILES, 2, 128, 4), jnp.int32)
    return Int8Weight(words, pack_scales(pad_channels(scales)), n, k // groups, scales.dtype.name)


@jax.jit
def unpack_int8(weight: Int8Weight) -> tuple[Array, Array]:
    """Codes uint8 `[..., N, K]` and scales `[..., N, K / group]`, as `pack_int8` took them."""
    codes = lax.bitcast_convert_type(weight.words, jnp.uint8) ^ 0x80
    # back from: block, unit, r, q, g, t, j // 2, + 8, + 1, + 2
    codes = codes.reshape(-1, weight.k // HALF, TILES, 2, 8, 4, 2, 2, 2, 2).transpose(0, 2, 7, 4, 1, 3, 5, 6, 9, 8)
    codes = codes.reshape(*weight.stack, -1, weight.k)[..., : weight.n, :]
    return codes, unpack_scales(weight.scales, weight.scale_dtype)[..., : weight.n, :]


def dequantize_int8(weight: Int8Weight, dtype) -> Array:
    """The matrix `[..., N, K]`: code times scale in fp32, then cast."""
    codes, scales = unpack_int8(weight)
    scales = jnp.repeat(scales.astype(jnp.float32), weight.group, axis=-1)
    return ((codes.astype(jnp.float32) - 128) * scales).astype(dtype)


def _operands_16bit(codes, q, dtype, *, interpret):
    return tuple(bytes_to_16bit(codes[q], j, dtype, interpret=interpret) for j in range(2))


def _operand_int8(codes, q, *, interpret):
    del interpret  # as packed
    return codes[q]


FORMAT = Format(columns=64, arrays=2, operands_16bit=_operands_16bit, operand_int8=_operand_int8, int8_factor=1)


def heuristics(shape: tuple[int, int, int], activation_bits: int, device: Device) -> Config:
    """A `Config` for rows, channels and columns `(m, n, k)`."""
    return choose(FORMAT, shape, activation_bits, device)


def int8_matmul(
    x: Array,
    weight: Int8Weight,
    layer: Array | int | None = None,
    *,
    activation_bits: int = 16,
    out_dtype=None,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """`x` times a packed matrix, transposed: `[M, K] x [N, K] -> [M, N]`. As `int4_matmul`, but for the matrix.

    Args:
      x: bf16 or fp16 `[M, K]`.
      weight: `[N, K]`, or a stack of such.
      layer: which matrix of the stack; None if there is no stack.
      activation_bits: 16, or 8 to round each row of `x` to bytes with a scale of its own.
      out_dtype: of the result; default `x.dtype`.
      config: default `heuristics` of the current device.
      interpret: see `kernel_call`.

    Raises:
      ValueError: shapes, dtypes, layer or config do not fit the matrix.
    """
    packed = Packed(weight.words, weight.scales, weight.n, weight.k, weight.group, weight.scale_dtype, weight.stack)
    return packed_matmul(
        x,
        packed,
        FORMAT,
        layer,
        lambda: dequantize_int8(select(weight, layer), x.dtype),
        activation_bits=activation_bits,
        out_dtype=out_dtype,
        config=config,
        interpret=interpret,
    )


def int8_matmul_reference(
    x: Array, weight: Int8Weight, layer: Array | int | None = None, *, activation_bits: int = 16, out_dtype=None
) -> Array:
    """What `int8_matmul` must equal for up to 128 rows, in fp32."""
    matrix = dequantize_int8(select(weight, layer), jnp.float32)
    return reference_matmul(x, matrix, activation_bits, out_dtype)
