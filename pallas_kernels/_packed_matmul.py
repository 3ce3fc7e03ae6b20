"""The kernel of the matmuls with few rows, whatever the width of weights and activations.

    y[m, n] = sum_k x[m, k] * code[n, k] * scale[n, k // group]

At up to 32 rows the time is that of reading the matrix, so everything serves the stream of weights: it is packed in the
order in which lanes consume it, so that a warp reads 4 KB in a row and no value moves between lanes; the tensor cores
take weights as their A operand (`_instructions`); and the schedule keeps every processor busy to the end (`_stream_k`).

Of 64 columns, lane (g, t) takes 8 t to 8 t + 7 of either half, for channels g and g + 8 of every tile of 16. Eight
activations of 16 bits lie side by side in a row of x and are two B operands. Eight of 8 bits are one, for which they
lie side by side with those of the other half once `permute_columns` has laid them so.

    half q, quadruple j of a lane's columns     c = 32 q + 8 t + 4 j
      16 bits   two pairs, each a half of an operand of 16 columns     c, c + 1 | c + 2, c + 3
      8 bits    a half of an operand of 32 columns                     c, c + 2, c + 1, c + 3

The odd order of four bytes is what makes one layout of the weights do for both: a mask leaves bytes 0 and 2 in place as
the two halves of a word, which must be neighbouring columns; without the mask all four are an operand as they are.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from pallas_kernels._call import kernel_call
from pallas_kernels._instructions import HIGHEST, INTEGER_ZERO, add_scaled, add_scaled_integers, mma_16bit, mma_int8
from pallas_kernels._stream_k import (
    BLOCK,
    MAX_ROWS,
    TILES,
    TOKENS,
    Rows,
    Schedule,
    floordiv,
    lane_words,
    remainder,
    schedule,
    store_tiles,
    stream_k,
    sum_slots,
)
from pallas_kernels.device import Device, current_device

Array = jax.Array
T = TypeVar("T")

HALF = 64  # columns that are laid out together
_DEQUANTIZE_ABOVE = 128  # rows from which writing the matrix out in 16 bits once is cheaper than reading it again


class Format(NamedTuple):
    """How codes lie in a unit of 64 channels by `columns` columns: `columns / 64 * TILES * arrays` arrays of 128 words.

    arrays: that hold a tile of 16 channels by 64 columns.
    operands_16bit: (those arrays, half q, dtype, interpret=) -> the two A operands of columns 32 q to 32 q + 31.
    operand_int8: (those arrays, half q, interpret=) -> the one A operand of the same.
    int8_factor: by which `operand_int8` multiplies codes.
    """

    columns: int
    arrays: int
    operands_16bit: Callable[..., tuple[Array, Array]]
    operand_int8: Callable[..., Array]
    int8_factor: int


class Packed(NamedTuple):
    """A packed matrix or a stack of them.

    words: int32 `[..., blocks, k / columns, ...]`; scales: int32 `[..., blocks, k / group, 8, 4]`.
    """

    words: Array
    scales: Array
    n: int
    k: int
    group: int
    scale_dtype: str
    stack: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """How the matrix is cut up; any choice gives the same product, but for the order of its additions.

    warps: of a program. Each takes its own columns of a step; must divide the number of units along K.
    programs: that share the matrix.
    early_x: whether activations, too, are loaded while the unit before is multiplied; weights always are.
    """

    warps: int
    programs: int
    early_x: bool = True


def choose(form: Format, shape: tuple[int, int, int], activation_bits: int, device: Device) -> Config:
    """As many programs as the registers of all processors hold: 168 of them a thread for up to 16 rows, 255 above.

    To load activations early takes registers too: with more rows than that, or with 8 bits, a few would spill. So they
    would for up to 16 rows of 8 bits by bytes of weights in programs of four warps: the assembler aims at 128 of them.
    """
    m, _, k = shape
    few = m <= 2 * TOKENS
    most = 2 if few and activation_bits == 8 and form.int8_factor == 1 else 4  # int8 by int8
    warps = next(w for w in (most, 2, 1) if k // form.columns % w == 0)
    return Config(
        warps=warps,
        programs=(12 if few else 8) * device.cores // warps,
        early_x=few and activation_bits == 16,
    )


def pack_scales(scales: Array) -> Array:
    """`[..., N, groups]` of 16 bits, N a multiple of 64 -> int32 `[..., N / 64, groups, 8, 4]`.

    Word [g, r] holds the scales of channels 16 r + g and 16 r + g + 8.
    """
    *stack, n, groups = scales.shape
    pairs = scales.reshape(-1, TILES, 2, 8, groups).transpose(0, 4, 3, 1, 2)
    return lax.bitcast_convert_type(pairs, jnp.int32).reshape(*stack, n // BLOCK, groups, 8, TILES)


def unpack_scales(words: Array, dtype: str) -> Array:
    """The inverse of `pack_scales`."""
    *stack, blocks, groups, _, _ = words.shape
    pairs = lax.bitcast_convert_type(words, dtype).reshape(-1, groups, 8, TILES, 2)
    return pairs.transpose(0, 3, 4, 2, 1).reshape(*stack, blocks * BLOCK, groups)


def pad_channels(t: Array, fill: int = 0) -> Array:
    """`[..., N, width]` with N padded to whole blocks."""
    padding = [(0, 0)] * (t.ndim - 2) + [(0, -t.shape[-2] % BLOCK), (0, 0)]
    return jnp.pad(t, padding, constant_values=fill)


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Rounds every row of `x [M, K]` to int8 with a scale of its own, fp32 `[M, 1]`: the largest becomes 127."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


def permute_columns(x: Array) -> Array:
    """int8 `[M, K]` as lanes read it: each 64 columns in the order t, q, j, and four bytes in the odd order above."""
    m, k = x.shape
    return x.reshape(m, k // HALF, 2, 4, 2, 2, 2).transpose(0, 1, 3, 2, 4, 6, 5).reshape(m, k)


def packed_matmul(
    x: Array,
    weight: Packed,
    form: Format,
    layer: Array | int | None,
    dequantize: Callable[[], Array],
    *,
    activation_bits: int,
    out_dtype,
    config: Config | None,
    interpret: bool,
) -> Array:
    """`[M, K] x [N, K] -> [M, N]`, for the public functions. dequantize: makes the matrix `[N, K]` in `x.dtype`."""
    m, k = _check(x, weight, layer, activation_bits)
    dtype = jnp.dtype(out_dtype or x.dtype)
    if m > _DEQUANTIZE_ABOVE:
        dims = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, dequantize(), dims, preferred_element_type=jnp.float32).astype(dtype)
    call = functools.partial(_few_rows, weight=weight, form=form, layer=layer, activation_bits=activation_bits)
    parts = [call(x[i : i + MAX_ROWS], config=config, interpret=interpret).astype(dtype) for i in range(0, m, MAX_ROWS)]
    return jnp.concatenate(parts) if parts else jnp.zeros((0, weight.n), dtype)


def _few_rows(
    x: Array,
    weight: Packed,
    form: Format,
    layer: Array | int | None,
    activation_bits: int,
    config: Config | None,
    interpret: bool,
) -> Array:
    """The product with at most `MAX_ROWS` rows, fp32."""
    m, k = x.shape
    config = config or choose(form, (m, weight.n, k), activation_bits, current_device())
    if config.warps not in (1, 2, 4, 8) or k // form.columns % config.warps:
        raise ValueError(f"{config.warps} warps of {form.columns} columns do not divide k = {k}")

    x_dtype, row_scale = x.dtype.name, None
    if activation_bits == 8:
        x, row_scale = quantize_rows(x)
        x, row_scale = permute_columns(x), row_scale / form.int8_factor
    values = 32 // activation_bits  # in a word
    rows = Rows(m, k // values)
    blocks = weight.words.shape[len(weight.stack)]
    plan = schedule(blocks, k // (form.columns * config.warps), config.programs)
    partial = kernel_call(
        functools.partial(
            _kernel,
            form=form,
            plan=plan,
            rows=rows,
            config=config,
            group=weight.group,
            x_dtype=None if activation_bits == 8 else x_dtype,
            scale_dtype=weight.scale_dtype,
            interpret=interpret,
        ),
        [
            jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
            lax.bitcast_convert_type(x.reshape(m, k // values, values), jnp.int32).reshape(-1),
            weight.words.reshape(*(weight.stack or (1,)), -1),
            weight.scales.reshape(*(weight.stack or (1,)), -1),
        ],
        jax.ShapeDtypeStruct((plan.slots * m * blocks * BLOCK,), jnp.float32),
        name="packed_matmul",
        grid=(plan.programs,),
        num_warps=config.warps,
        interpret=interpret,
    )
    partial = partial.reshape(plan.slots, m, blocks * BLOCK)[..., : weight.n]
    total = sum_slots(partial)
    return total if row_scale is None else total * row_scale


def reference_matmul(x: Array, matrix: Array, activation_bits: int, out_dtype) -> Array:
    """What `packed_matmul` must equal for a matrix `[N, K]`, in fp32."""
    dtype, x = out_dtype or x.dtype, x.astype(jnp.float32)
    if activation_bits == 8:
        codes, scale = quantize_rows(x)
        x = codes.astype(jnp.float32) * scale
    return jnp.matmul(x, matrix.T, precision=HIGHEST).astype(dtype)


def select(weight: T, layer: Array | int | None) -> T:
    """One matrix of a stack."""
    return weight if layer is None else jax.tree.map(lambda leaf: leaf[layer], weight)


def _kernel(
    layer_ref,
    x_ref,
    words_ref,
    scales_ref,
    out_ref,
    *,
    form: Format,
    plan: Schedule,
    rows: Rows,
    config: Config,
    group: int,
    x_dtype: str | None,
    scale_dtype: str,
    interpret: bool,
):
    """x_dtype: "bfloat16" or "float16"; None for bytes."""
    layer, warps = layer_ref[0], config.warps
    warp, column = lane_words(warps)
    scale_column = floordiv(column, 16) * TILES + remainder(column, 4)
    units = plan.steps * warps  # along K
    halves = form.columns // HALF
    x_arrays = 1 if x_dtype is None else 2  # that hold 64 columns of a tile of rows
    unit_arrays = halves * TILES * form.arrays

    def load_x(step):
        unit = step * warps + warp
        return tuple(
            rows.load(x_ref, tile, (unit * (halves * x_arrays) + i) * 16)
            for i in range(halves * x_arrays)
            for tile in range(rows.tiles)
        )

    def load(block, step):
        x = load_x(step) if config.early_x else ()
        unit = step * warps + warp
        start = (block * units + unit) * (unit_arrays * 128)
        words = [
            triton.load(words_ref.at[layer, start + (128 * i + column)], eviction_policy="evict_first")
            for i in range(unit_arrays)
        ]
        scale = block * (units * form.columns // group) + floordiv(unit * form.columns, group)
        scales = triton.load(scales_ref.at[layer, scale * (8 * TILES) + scale_column])
        return (*x, *words, scales)

    def multiply(step, loaded, totals):
        x = loaded[: -unit_arrays - 1] or load_x(step)
        words, scales = loaded[-unit_arrays - 1 : -1], loaded[-1]
        added = []
        for r in range(TILES):
            products = [_zero(warps, x_dtype)] * rows.tiles
            for half in range(halves):
                start = (half * TILES + r) * form.arrays
                codes = words[start : start + form.arrays]
                for q in range(2):
                    products = _multiply_half(form, codes, q, x, half, products, x_dtype, interpret)
            add = add_scaled_integers if x_dtype is None else add_scaled
            for product, total in zip(products, totals[r * rows.tiles : (r + 1) * rows.tiles], strict=True):
                added.append(add(product, scales, r, total, scale_dtype, interpret=interpret))
        return tuple(added)

    def store(block, slot, last, totals):
        store_tiles(out_ref, plan, rows, block, slot, last, totals)

    zeros = tuple(jnp.zeros((warps, 128), jnp.float32) for _ in range(TILES * rows.tiles))
    stream_k(plan, load, multiply, store, zeros)


def _zero(warps: int, x_dtype: str | None) -> Array:
    if x_dtype is None:
        return jnp.full((warps, 128), INTEGER_ZERO, jnp.int32)
    return jnp.zeros((warps, 128), jnp.float32)


def _multiply_half(
    form: Format,
    codes: Sequence[Array],
    q: int,
    x: Sequence[Array],
    half: int,
    products: Sequence[Array],
    x_dtype: str | None,
    interpret: bool,
) -> list[Array]:
    """Adds the products of 32 columns of a tile of channels, for every tile of rows."""
    tiles = len(products)
    if x_dtype is None:
        a = form.operand_int8(codes, q, interpret=interpret)
        b = x[half * tiles : (half + 1) * tiles]
        return [mma_int8(a, b, q, c, interpret=interpret) for b, c in zip(b, products, strict=True)]
    a = form.operands_16bit(codes, q, x_dtype, interpret=interpret)
    b = x[(2 * half + q) * tiles : (2 * half + q + 1) * tiles]
    return [mma_16bit(*a, b, c, x_dtype, interpret=interpret) for b, c in zip(b, products, strict=True)]


def _check(x: Array, weight: Packed, layer: Array | int | None, activation_bits: int) -> tuple[int, int]:
    """Rows and columns of `x`."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"x must be bfloat16 or float16, got {x.dtype}; cast it")
    if x.ndim != 2 or x.shape[1] != weight.k:
        raise ValueError(f"x must be [M, {weight.k}] for this matrix [{weight.n}, {weight.k}], got {list(x.shape)}")
    if len(weight.stack) != (layer is not None):
        raise ValueError(f"a stack of matrices {list(weight.stack)} takes a layer; one matrix takes none; got {layer}")
    if isinstance(layer, int) and not 0 <= layer < weight.stack[0]:
        raise ValueError(f"layer {layer} is not in [0, {weight.stack[0] - 1}]")
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits must be 8 or 16, got {activation_bits}")
    return x.shape
