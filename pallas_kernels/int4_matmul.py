"""Few rows of activations times a matrix of 4-bit integers with a scale for every 128 columns: W4A16 and W4A8.

    y[m, n] = sum_k x[m, k] * code[n, k] * scale[n, k // 128]

Codes become bf16 or fp16 values exactly, or bytes; the products of a group are summed before they are scaled, in fp32
or as integers, so no scale is ever rounded. How it is made fast: `_packed_matmul`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._instructions import nibbles_to_16bit, nibbles_to_bytes
from pallas_kernels._packed_matmul import (
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

GROUP = 128  # columns that share a scale


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "scales"], meta_fields=["n", "scale_dtype"])
@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """A matrix `[n, k]` as `pack_int4` arranges it, or several, stacked along leading axes.

    words: int32 `[..., blocks, k / 128, 2, 4, 128]`, blocks of 64 channels; channels past `n` are zero.
    scales: int32 `[..., blocks, k / 128, 8, 4]`, two of `scale_dtype` in each.
    """

    words: Array
    scales: Array
    n: int
    scale_dtype: str

    @property
    def k(self) -> int:
        return self.words.shape[-4] * GROUP

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.words.shape[:-5]


@jax.jit
def pack_int4(codes: Array, scales: Array) -> Int4Weight:
    """Arranges a matrix for `int4_matmul`. The inverse is `unpack_int4`.

    A unit, 64 channels by 128 columns, is 2 x 4 arrays of 128 words: [h, r] holds columns 64 h to 64 h + 63 of
    channels 16 r to 16 r + 15, in the order of the tensor cores' A operand (`_instructions`). Word j of lane
    (g, t), the one at 16 g + 4 t + j, is

        bits      31..28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
        channel   g + 8   g       g + 8   g       g + 8   g       g + 8   g        with
        column    c + 3   c + 3   c + 1   c + 1   c + 2   c + 2   c       c        c = 32 (j // 2) + 8 t + 4 (j % 2)

    Two nibbles 16 bits apart are the two values of one word of an operand of 16 bits, and every other nibble is a byte
    of one of 8 bits, so that a shift and a mask make either.

    Args:
      codes: uint8 `[..., N, K / 2]`, each a code plus 8, the even column in the low half.
      scales: fp16 or bf16 `[..., N, K / 128]`, of either sign.

    Raises:
      ValueError: shapes or dtypes are not these, or K is not a multiple of 128.
    """
    *stack, n, width = codes.shape
    k = 2 * width
    if codes.dtype != jnp.uint8 or k % GROUP or not n * k:
        raise ValueError(
            f"codes must be uint8 [..., N, K / 2] with K a multiple of {GROUP}, got {codes.dtype}{list(codes.shape)}"
        )
    if scales.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"scales must be float16 or bfloat16, got {scales.dtype}; cast them")
    if list(scales.shape) != [*stack, n, k // GROUP]:
        raise ValueError(f"scales must be {[*stack, n, k // GROUP]} for these codes, got {list(scales.shape)}")

    codes = _nibbles(pad_channels(codes, 0x88))
    # channel: block, r, + 8, g; column: group, h, j // 2, t, j % 2, + 2, + 1
    codes = codes.reshape(-1, TILES, 2, 8, k // GROUP, 2, 2, 4, 2, 2, 2)
    codes = codes.transpose(0, 4, 5, 1, 3, 7, 6, 8, 10, 9, 2).astype(jnp.uint32)
    words = jnp.sum(codes << _shifts(), axis=(-3, -2, -1), dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32).reshape(*stack, -1, k // GROUP, 2, TILES, 128)
    return Int4Weight(words, pack_scales(pad_channels(scales)), n, scales.dtype.name)


@jax.jit
def unpack_int4(weight: Int4Weight) -> tuple[Array, Array]:
    """Codes uint8 `[..., N, K / 2]` and scales `[..., N, K / 128]`, as `pack_int4` took them."""
    stack, n, k = weight.stack, weight.n, weight.k
    words = lax.bitcast_convert_type(weight.words, jnp.uint32).reshape(-1, k // GROUP, 2, TILES, 8, 4, 2, 2)
    codes = (words[..., None, None, None] >> _shifts() & 15).astype(jnp.uint8)
    # back from: block, group, h, r, g, t, j // 2, j % 2, + 1, + 2, + 8
    codes = codes.transpose(0, 3, 10, 4, 1, 2, 6, 5, 7, 9, 8).reshape(*stack, -1, k // 2, 2)[..., :n, :, :]
    scales = unpack_scales(weight.scales, weight.scale_dtype)
    return codes[..., 0] | codes[..., 1] << 4, scales[..., :n, :]


def dequantize_int4(weight: Int4Weight, dtype) -> Array:
    """The matrix `[..., N, K]`: code times scale in fp32, then cast."""
    codes, scales = unpack_int4(weight)
    scales = jnp.repeat(scales.astype(jnp.float32), GROUP, axis=-1)
    return ((_nibbles(codes).astype(jnp.float32) - 8) * scales).astype(dtype)


def _nibbles(codes: Array) -> Array:
    """`[..., width]` bytes -> `[..., 2 width]`, the low half of each first."""
    return jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def _shifts() -> Array:
    """Of the nibbles of a word: for column + 1, + 2, channel + 8."""
    return jnp.arange(0, 32, 4, dtype=jnp.uint32).reshape(2, 2, 2)


def _operands_16bit(codes, q, dtype, *, interpret):
    return tuple(nibbles_to_16bit(codes[0], 2 * q + j, dtype, interpret=interpret) for j in range(2))


def _operand_int8(codes, q, *, interpret):
    return nibbles_to_bytes(codes[0], q, interpret=interpret)


FORMAT = Format(columns=128, arrays=1, operands_16bit=_operands_16bit, operand_int8=_operand_int8, int8_factor=16)


def heuristics(shape: tuple[int, int, int], activation_bits: int, device: Device) -> Config:
    """A `Config` for rows, channels and columns `(m, n, k)`."""
    return choose(FORMAT, shape, activation_bits, device)


def int4_matmul(
    x: Array,
    weight: Int4Weight,
    layer: Array | int | None = None,
    *,
    activation_bits: int = 16,
    out_dtype=None,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """`x` times a packed matrix, transposed: `[M, K] x [N, K] -> [M, N]`.

    Made for up to 32 rows; more are taken 32 at a time, and past 128 the matrix is written out in `x.dtype` for an
    ordinary product. A row of the result depends on its own row of `x` alone, whatever the others hold.

    Args:
      x: bf16 or fp16 `[M, K]`.
      weight: `[N, K]`; matrices that share an input are best packed as one.
      layer: which matrix of a stack `[layers, N, K]`, an int32 scalar that a loop may count: the kernel finds the
        matrix itself, where a slice would be copied first. None if there is no stack.
      activation_bits: 16, or 8 to round each row of `x` to bytes with a scale of its own, for which
        tensor cores are at least twice as fast: it matters from about 16 rows on. Past 128 rows it is always 16.
      out_dtype: of the result; default `x.dtype`.
      config: default `heuristics` of the current device.
      interpret: see `kernel_call`.

    Raises:
      ValueError: shapes, dtypes, layer or config do not fit the matrix.
    """
    packed = Packed(weight.words, weight.scales, weight.n, weight.k, GROUP, weight.scale_dtype, weight.stack)
    return packed_matmul(
        x,
        packed,
        FORMAT,
        layer,
        lambda: dequantize_int4(select(weight, layer), x.dtype),
        activation_bits=activation_bits,
        out_dtype=out_dtype,
        config=config,
        interpret=interpret,
    )


def int4_matmul_reference(
    x: Array, weight: Int4Weight, layer: Array | int | None = None, *, activation_bits: int = 16, out_dtype=None
) -> Array:
    """What `int4_matmul` must equal for up to 128 rows, in fp32."""
    matrix = dequantize_int4(select(weight, layer), jnp.float32)
    return reference_matmul(x, matrix, activation_bits, out_dtype)
