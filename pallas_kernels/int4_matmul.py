"""Few rows of activations times a matrix of 4-bit integers with a scale for every 128 columns (W4A16).

    y[m, n] = sum_k x[m, k] * code[n, k] * scale[n, k // 128]

At up to 32 rows the time is that of reading the matrix, so everything serves the stream of weights: it is packed in the
order in which lanes consume it, so that a warp reads 4 KB in a row and no value moves between lanes; the tensor cores
take weights as their A operand; and the schedule keeps every processor busy to the end (`_stream_k`). Codes become
bf16 or fp16 values exactly. A group's products are summed in fp32 and then scaled, so no scale is ever rounded.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

from pallas_kernels._call import kernel_call
from pallas_kernels._instructions import HIGHEST, add_scaled, mma_16bit, nibbles_to_16bit
from pallas_kernels._stream_k import (
    BLOCK,
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

GROUP = 128  # columns that share a scale, and columns of a unit
_LOADS = 8  # arrays [warps, 128] that hold a unit's codes: its four row tiles for either half of the columns
_DEQUANTIZE_ABOVE = 128  # rows from which writing the matrix out in 16 bits once is cheaper than reading it again


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

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


@dataclasses.dataclass(frozen=True)
class Config:
    """How the matrix is cut up; any choice gives the same product, but for the order of its additions.

    warps: of a program. Each takes its own 128 of `128 * warps` columns; must divide k / 128.
    programs: that share the matrix.
    """

    warps: int
    programs: int


def heuristics(shape: tuple[int, int, int], device: Device) -> Config:
    """A `Config` for rows, channels and columns `(m, n, k)`.

    As many programs as the registers of all processors hold at once: 168 of them a thread for up to 16 rows, 255 above.
    """
    m, _, k = shape
    warps = next(w for w in (4, 2, 1) if k // GROUP % w == 0)
    per_core = 12 if m <= 2 * TOKENS else 8  # warps
    return Config(warps=warps, programs=per_core * device.cores // warps)


@jax.jit
def pack_int4(codes: Array, scales: Array) -> Int4Weight:
    """Arranges a matrix for `int4_matmul`. The inverse is `unpack_int4`.

    A unit, 64 channels by 128 columns, is 2 x 4 arrays of 128 words: [h, r] holds columns 64 h to 64 h + 63 of
    channels 16 r to 16 r + 15, in the order of the tensor cores' A operand (`_instructions`). Word j of lane
    (g, t), the one at 16 g + 4 t + j, is

        bits      31..28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
        channel   g + 8   g       g + 8   g       g + 8   g       g + 8   g        with
        column    c + 3   c + 3   c + 1   c + 1   c + 2   c + 2   c       c        c = 32 (j // 2) + 8 t + 4 (j % 2)

    Two nibbles 16 bits apart are the two values of one word of an operand, so that a shift and a mask make it. And a
    lane's columns, over j and the bits, are 8 t to 8 t + 7 of 32: the eight activations that it reads at once.

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
    padding = [(0, 0)] * len(stack) + [(0, -n % BLOCK), (0, 0)]
    codes = jnp.pad(codes, padding, constant_values=0x88)
    scales = jnp.pad(scales, padding)

    codes = jnp.stack([codes & 15, codes >> 4], axis=-1)
    # channel: block, r, + 8, g; column: group, h, j // 2, t, j % 2, + 2, + 1
    codes = codes.reshape(-1, TILES, 2, 8, k // GROUP, 2, 2, 4, 2, 2, 2)
    codes = codes.transpose(0, 4, 5, 1, 3, 7, 6, 8, 10, 9, 2).astype(jnp.uint32)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32).reshape(2, 2, 2)
    words = jnp.sum(codes << shifts, axis=(-3, -2, -1), dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)

    pairs = scales.reshape(-1, TILES, 2, 8, k // GROUP).transpose(0, 4, 3, 1, 2)  # block, group, g, r, + 8
    return Int4Weight(
        words.reshape(*stack, -1, k // GROUP, 2, TILES, 128),
        lax.bitcast_convert_type(pairs, jnp.int32).reshape(*stack, -1, k // GROUP, 8, TILES),
        n=n,
        scale_dtype=scales.dtype.name,
    )


@jax.jit
def unpack_int4(weight: Int4Weight) -> tuple[Array, Array]:
    """Codes uint8 `[..., N, K / 2]` and scales `[..., N, K / 128]`, as `pack_int4` took them."""
    stack, n, k = weight.stack, weight.n, weight.k
    words = lax.bitcast_convert_type(weight.words, jnp.uint32).reshape(-1, k // GROUP, 2, TILES, 8, 4, 2, 2)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32).reshape(2, 2, 2)
    codes = (words[..., None, None, None] >> shifts & 15).astype(jnp.uint8)
    # back from: block, group, h, r, g, t, j // 2, j % 2, + 1, + 2, + 8
    codes = codes.transpose(0, 3, 10, 4, 1, 2, 6, 5, 7, 9, 8).reshape(*stack, -1, k // 2, 2)[..., :n, :, :]
    pairs = lax.bitcast_convert_type(weight.scales, weight.scale_dtype).reshape(-1, k // GROUP, 8, TILES, 2)
    scales = pairs.transpose(0, 3, 4, 2, 1).reshape(*stack, -1, k // GROUP)[..., :n, :]
    return codes[..., 0] | codes[..., 1] << 4, scales


def dequantize_int4(weight: Int4Weight, dtype) -> Array:
    """The matrix `[..., N, K]`: code times scale in fp32, then cast."""
    codes, scales = unpack_int4(weight)
    codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    scales = jnp.repeat(scales.astype(jnp.float32), GROUP, axis=-1)
    return ((codes.astype(jnp.float32) - 8) * scales).astype(dtype)


def int4_matmul_reference(x: Array, weight: Int4Weight, layer: Array | int | None = None, *, out_dtype=None) -> Array:
    """What `int4_matmul` must equal, in fp32."""
    matrix = dequantize_int4(_select(weight, layer), jnp.float32)
    product = jnp.matmul(x.astype(jnp.float32), matrix.T, precision=HIGHEST)
    return product.astype(out_dtype or x.dtype)


def int4_matmul(
    x: Array,
    weight: Int4Weight,
    layer: Array | int | None = None,
    *,
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
      out_dtype: of the result; default `x.dtype`.
      config: default `heuristics` of the current device.
      interpret: see `kernel_call`.

    Raises:
      ValueError: shapes, dtypes, layer or config do not fit the matrix.
    """
    m, k = _check(x, weight, layer)
    dtype = jnp.dtype(out_dtype or x.dtype)
    if m > _DEQUANTIZE_ABOVE:
        matrix = dequantize_int4(_select(weight, layer), x.dtype)
        return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(dtype)
    if not m:
        return jnp.zeros((0, weight.n), dtype)
    config = config or heuristics((m, weight.n, k), current_device())
    if config.warps not in (1, 2, 4, 8) or k // GROUP % config.warps:
        raise ValueError(f"{config.warps} warps of {GROUP} columns do not divide k = {k}")

    rows = Rows(m, k // 2)
    plan = schedule(weight.words.shape[-5], k // (GROUP * config.warps), config.programs)
    channels = plan.blocks * BLOCK
    partial = kernel_call(
        functools.partial(
            _kernel,
            plan=plan,
            rows=rows,
            warps=config.warps,
            dtype=x.dtype.name,
            scale_dtype=weight.scale_dtype,
            interpret=interpret,
        ),
        [
            jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1),
            lax.bitcast_convert_type(x.reshape(m, k // 2, 2), jnp.int32).reshape(-1),
            weight.words.reshape(*(weight.stack or (1,)), -1),
            weight.scales.reshape(*(weight.stack or (1,)), -1),
        ],
        jax.ShapeDtypeStruct((plan.slots * m * channels,), jnp.float32),
        name="int4_matmul",
        grid=(plan.programs, rows.chunks),
        num_warps=config.warps,
        interpret=interpret,
    )
    return sum_slots(partial.reshape(plan.slots, m, channels)[..., : weight.n], dtype)


def _kernel(
    layer_ref,
    x_ref,
    words_ref,
    scales_ref,
    out_ref,
    *,
    plan: Schedule,
    rows: Rows,
    warps: int,
    dtype: str,
    scale_dtype: str,
    interpret: bool,
):
    layer = layer_ref[0]
    groups = plan.steps * warps
    first = rows.first()
    warp, column = lane_words(warps)
    scale_column = floordiv(column, 16) * TILES + remainder(column, 4)

    def load(block, step):
        group = step * warps + warp
        x = [
            rows.load(x_ref, first, tile, group * 64 + (32 * half + 16 * quarter))
            for half in range(2)
            for quarter in range(2)
            for tile in range(rows.tiles)
        ]
        unit = block * groups + group
        words = [
            triton.load(words_ref.at[layer, unit * 1024 + (128 * i + column)], eviction_policy="evict_first")
            for i in range(_LOADS)
        ]
        scales = triton.load(scales_ref.at[layer, unit * 32 + scale_column])
        return (*x, *words, scales)

    def multiply(loaded, totals):
        *x, scales = loaded
        x, words = x[:-_LOADS], x[-_LOADS:]
        sums = []
        for r in range(TILES):
            products = [jnp.zeros((warps, 128), jnp.float32)] * rows.tiles
            for half in range(2):
                a = [nibbles_to_16bit(words[half * TILES + r], j, dtype, interpret=interpret) for j in range(4)]
                for quarter in range(2):
                    for tile in range(rows.tiles):
                        b = x[(2 * half + quarter) * rows.tiles + tile]
                        products[tile] = mma_16bit(
                            a[2 * quarter], a[2 * quarter + 1], b, products[tile], dtype, interpret=interpret
                        )
            for tile in range(rows.tiles):
                total = totals[r * rows.tiles + tile]
                sums.append(add_scaled(products[tile], scales, r, total, scale_dtype, interpret=interpret))
        return tuple(sums)

    def store(block, slot, last, totals):
        store_tiles(out_ref, plan, rows, first, block, slot, last, totals)

    zeros = tuple(jnp.zeros((warps, 128), jnp.float32) for _ in range(TILES * rows.tiles))
    stream_k(plan, load, multiply, store, zeros)


def _select(weight: Int4Weight, layer: Array | int | None) -> Int4Weight:
    return weight if layer is None else jax.tree.map(lambda leaf: leaf[layer], weight)


def _check(x: Array, weight: Int4Weight, layer: Array | int | None) -> tuple[int, int]:
    """Rows and columns of `x`."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"x must be bfloat16 or float16, got {x.dtype}; cast it")
    if x.ndim != 2 or x.shape[1] != weight.k:
        raise ValueError(f"x must be [M, {weight.k}] for this matrix [{weight.n}, {weight.k}], got {list(x.shape)}")
    if len(weight.stack) != (layer is not None):
        raise ValueError(f"a stack of matrices {list(weight.stack)} takes a layer; one matrix takes none; got {layer}")
    if isinstance(layer, int) and not 0 <= layer < weight.stack[0]:
        raise ValueError(f"layer {layer} is not in [0, {weight.stack[0] - 1}]")
    return x.shape
