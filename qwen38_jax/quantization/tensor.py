"""`QuantTensor`, a matrix stored as integers and scales, and its round-to-nearest quantiser; `RowBlocks`.

    W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g],  g = k // group

Codes are signed (-8..7 or -128..127) and so are scales: a quantiser that uses the whole range of codes lets the weight
of largest magnitude take the code -8, which makes about half of the scales negative.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels import int4_matmul as int4
from pallas_kernels import int8_matmul as int8

Array = jax.Array

_SCALE_DTYPES = ("float32", "bfloat16", "float16")


@struct.dataclass
class QuantTensor:
    """A matrix `[N, K]` of `bits`-bit integers, with any leading axes, e.g. that of stacked layers.

    Make one with `quant_tensor`, which checks the parts; indexing every leaf along a leading axis gives another.

    Attributes:
      codes: uint8 `[..., N, K * bits / 8]`: code + 2^(bits - 1), two to a byte for 4 bits, the even column in the low
        half. These are the bytes of a compressed-tensors file, and take what an int4 array should: half a byte each.
      scales: `[..., N, K / group]`, signed, in the dtype they came in (fp16, bf16 or fp32).
      zeros: int8 `[..., N, K / group]`, the code that stands for zero; None when it is 0 everywhere (symmetric).
      group_of: int32 `[..., K]`, the group of each column, for columns that were quantised in order of importance
        (act-order); None for k // group.
      bits: 4 or 8.
      group: columns that share a scale; K when there is one scale per row (per channel).
      dtype: of the matrix that this stands for, as an array has one.
      layout: how the arrays are arranged, one of `LAYOUTS`; "rows" is the order described here.
      scale_dtype: of `scales`, which another layout may hold as words.
      n: N, in a layout that pads it; None where the arrays tell.
    """

    codes: Array
    scales: Array
    zeros: Array | None
    group_of: Array | None
    bits: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)
    layout: str = struct.field(pytree_node=False)
    scale_dtype: str = struct.field(pytree_node=False)
    n: int | None = struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]` of the matrix."""
        rows = self if self.layout == "rows" else jax.eval_shape(LAYOUTS[self.layout].unpack, self)
        return (*rows.codes.shape[:-1], rows.codes.shape[-1] * 8 // self.bits)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def astype(self, dtype) -> "QuantTensor":
        """The same integers, standing for a matrix of another dtype."""
        return self.replace(dtype=jnp.dtype(dtype).name)


class Layout(NamedTuple):
    """An arrangement of a `QuantTensor`'s arrays; both functions take leading axes as they come.

    pack: of the layout "rows" into this one; raises ValueError for a matrix that it cannot hold. unpack: the inverse.
    """

    pack: Callable[[QuantTensor], QuantTensor]
    unpack: Callable[[QuantTensor], QuantTensor]


def _pack_mma(w: QuantTensor) -> QuantTensor:
    """Of what the layout cannot hold the packers refuse group sizes of 8-bit codes, and scales of 32 bits."""
    if w.zeros is not None or w.group_of is not None:
        what = "zero points" if w.zeros is not None else "columns out of order (act-order)"
        raise ValueError(f"the layout 'mma' has no place for {what}: keep the matrix in the layout 'rows'")
    if w.bits == 4 and w.group != int4.GROUP:
        raise ValueError(f"the layout 'mma' takes 4-bit codes in groups of {int4.GROUP} columns, got {w.group}")
    packed = (int4.pack_int4 if w.bits == 4 else int8.pack_int8)(w.codes, w.scales)
    return w.replace(codes=packed.words, scales=packed.scales, layout="mma", n=packed.n)


def _unpack_mma(w: QuantTensor) -> QuantTensor:
    codes, scales = (int4.unpack_int4 if w.bits == 4 else int8.unpack_int8)(kernel_weight(w))
    return w.replace(codes=codes, scales=scales, layout="rows", n=None)


def kernel_weight(w: QuantTensor) -> int4.Int4Weight | int8.Int8Weight:
    """A matrix in the layout "mma" as the kernels take it; no array is copied."""
    if w.bits == 4:
        return int4.Int4Weight(w.codes, w.scales, w.n, w.scale_dtype)
    return int8.Int8Weight(w.codes, w.scales, w.n, w.group, w.scale_dtype)


# "mma" is the order in which tensor cores take the codes; `pack_int4` and `pack_int8` say it in full. Codes and scales
# are int32 words `[..., ceil(N / BLOCK_ROWS), ...]`, of blocks of rows of which the last is padded.
BLOCK_ROWS = 64
LAYOUTS = {"rows": Layout(pack=lambda w: w, unpack=lambda w: w), "mma": Layout(_pack_mma, _unpack_mma)}


@struct.dataclass
class Indexed:
    """One matrix of a stack in integers that nothing has cut out of it: a slice would be copied, a kernel needs none.

    Attributes:
      stack: matrices along one leading axis.
      layer: which of them, an int32 scalar.
    """

    stack: QuantTensor
    layer: Array | int

    @property
    def matrix(self) -> QuantTensor:
        """The matrix, cut out."""
        return jax.tree.map(lambda t: lax.dynamic_index_in_dim(t, self.layer, keepdims=False), self.stack)


@struct.dataclass
class RowBlocks:
    """A matrix `[N, K]` whose rows are not all stored alike, e.g. one of several that were fused is more precise.

    Attributes:
      blocks: matrices of K columns, from the first row to the last, with the same leading axes.
    """

    blocks: tuple[Array | QuantTensor | Indexed, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, _, columns = self.blocks[0].shape
        return (*leading, sum(block.shape[-2] for block in self.blocks), columns)

    @property
    def dtype(self) -> str:
        return jnp.dtype(self.blocks[0].dtype).name

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def astype(self, dtype) -> "RowBlocks":
        """The same blocks, of or standing for another dtype."""
        return self.replace(blocks=tuple(block.astype(dtype) for block in self.blocks))


Weight = Array | QuantTensor | Indexed | RowBlocks


def is_quantised(leaf) -> bool:
    """Whether a leaf of `Params` is no array; for `is_leaf` of `jax.tree` functions, too."""
    return isinstance(leaf, (QuantTensor, RowBlocks))


def quant_tensor(
    codes: Array,
    scales: Array,
    zeros: Array | None = None,
    group_of: Array | None = None,
    *,
    bits: int,
    dtype: str,
) -> QuantTensor:
    """A `QuantTensor` in the layout "rows" of parts that fit each other; the group size follows from their shapes.

    Raises:
      ValueError: shapes or dtypes contradict each other; the message has both.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if codes.dtype != jnp.uint8 or codes.ndim < 2:
        raise ValueError(f"codes must be uint8 [..., N, K * {bits} / 8], got {codes.dtype}{list(codes.shape)}")
    *rows, width = codes.shape
    columns = width * 8 // bits
    if scales.dtype.name not in _SCALE_DTYPES:
        raise ValueError(f"scales must be one of {_SCALE_DTYPES}, got {scales.dtype}")
    if list(scales.shape[:-1]) != rows or not scales.shape[-1] or columns % scales.shape[-1]:
        raise ValueError(
            f"scales {list(scales.shape)} do not divide codes {list(codes.shape)}, a matrix {[*rows, columns]} in "
            f"{bits} bits, into whole groups"
        )
    if zeros is not None and (zeros.dtype != jnp.int8 or zeros.shape != scales.shape):
        raise ValueError(f"zeros must be int8{list(scales.shape)} as scales, got {zeros.dtype}{list(zeros.shape)}")
    if group_of is not None and (group_of.dtype != jnp.int32 or list(group_of.shape) != [*rows[:-1], columns]):
        raise ValueError(
            f"group_of must be int32{[*rows[:-1], columns]} for this matrix, got {group_of.dtype}{list(group_of.shape)}"
        )
    group = columns // scales.shape[-1]
    return QuantTensor(codes, scales, zeros, group_of, bits, group, jnp.dtype(dtype).name, "rows", scales.dtype.name)


def in_rows(w: Weight) -> Weight:
    """The same matrix with integers in the layout "rows"."""
    if isinstance(w, RowBlocks):
        return w.replace(blocks=tuple(in_rows(block) for block in w.blocks))
    return LAYOUTS[w.layout].unpack(w) if isinstance(w, QuantTensor) else w


def dequantize(w: Weight, dtype: str | None = None) -> Array:
    """The matrix `[..., N, K]`: `(code - zero) * scale` in fp32, then cast to `dtype` (None: `w.dtype`)."""
    if isinstance(w, RowBlocks):
        return jnp.concatenate([dequantize(block, dtype) for block in w.blocks], axis=-2)
    if isinstance(w, Indexed):
        return dequantize(w.matrix, dtype)
    if not isinstance(w, QuantTensor):
        return w.astype(dtype or w.dtype)
    w = in_rows(w)
    codes = unpack(w.codes, w.bits)
    if w.group_of is None:
        zeros, scales = (None if t is None else jnp.repeat(t, w.group, axis=-1) for t in (w.zeros, w.scales))
    else:
        group_of = w.group_of if w.group_of.ndim == 1 else w.group_of[..., None, :]
        group_of = jnp.broadcast_to(group_of, codes.shape)
        zeros, scales = (None if t is None else jnp.take_along_axis(t, group_of, -1) for t in (w.zeros, w.scales))
    return code_values(codes, scales, zeros).astype(dtype or w.dtype)


def quantize(
    w: Array,
    bits: int,
    group: int | None,
    *,
    symmetric: bool = True,
    scale_dtype: str = "float16",
) -> QuantTensor:
    """Rounds a matrix `[..., N, K]` of finite values to the nearest codes.

    Symmetric: the value of largest magnitude in a group is the code -2^(bits - 1), whatever its sign. Asymmetric: a
    group's range, widened to hold 0, spans all codes. Codes are the nearest under the scale as `scale_dtype` holds it.

    Args:
      group: columns that share a scale; None for one scale per row.

    Raises:
      ValueError: bits is neither 4 nor 8, or groups do not divide K.
    """
    columns = w.shape[-1]
    group = columns if group is None else group
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if group < 1 or columns % group or columns * bits % 8:
        raise ValueError(f"groups of {group} at {bits} bits do not divide rows of {columns} values")
    grouped = w.astype(jnp.float32).reshape(*w.shape[:-1], columns // group, group)
    scales, zeros = fit_grid(grouped, bits, symmetric, scale_dtype)
    codes = nearest_codes(grouped, scales[..., None], None if zeros is None else zeros[..., None], bits)
    return quant_tensor(pack(codes.reshape(w.shape), bits), scales, zeros, bits=bits, dtype=w.dtype.name)


def fit_grid(
    values: Array, bits: int, symmetric: bool, scale_dtype: str, shrink: float | Array = 1.0
) -> tuple[Array, Array | None]:
    """Scale and zero point of groups of fp32 `values [..., group]`: `[...]` in `scale_dtype`, and int8 or None.

    A `shrink` below 1 clips the range that the codes span to that part of it.
    """
    low, high = _code_range(bits)
    if symmetric:
        largest = jnp.take_along_axis(values, jnp.argmax(jnp.abs(values), axis=-1, keepdims=True), -1)[..., 0]
        return (shrink * largest / low).astype(scale_dtype), None
    bottom, top = shrink * jnp.minimum(values.min(-1), 0), shrink * jnp.maximum(values.max(-1), 0)
    scales = ((top - bottom) / (high - low)).astype(scale_dtype)
    return scales, jnp.clip(jnp.round(low - bottom / _step(scales)), low, high).astype(jnp.int8)


def nearest_codes(values: Array, scales: Array, zeros: Array | None, bits: int) -> Array:
    """int8 codes whose values are nearest to fp32 `values`; `scales` and `zeros` broadcast against them."""
    codes = jnp.round(values / _step(scales))
    if zeros is not None:
        codes = codes + zeros
    return jnp.clip(codes, *_code_range(bits)).astype(jnp.int8)


def code_values(codes: Array, scales: Array, zeros: Array | None) -> Array:
    """What int8 `codes` stand for, in fp32: `(codes - zeros) * scales`, which broadcast against them."""
    if zeros is not None:
        codes = codes.astype(jnp.int16) - zeros  # 8-bit codes less their zero need 9 bits
    return codes.astype(jnp.float32) * scales.astype(jnp.float32)


def _code_range(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _step(scales: Array) -> Array:
    """Scales to divide by: 1 for a group of zeros."""
    scales = scales.astype(jnp.float32)
    return jnp.where(scales == 0, 1, scales)


def unpack(codes: Array, bits: int) -> Array:
    """Signed codes int8 `[..., K]` of the bytes `[..., K * bits / 8]`."""
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return (codes.astype(jnp.int16) - 2 ** (bits - 1)).astype(jnp.int8)


def pack(codes: Array, bits: int) -> Array:
    """Bytes uint8 `[..., K * bits / 8]` of signed codes `[..., K]`: the inverse of `unpack`."""
    codes = (codes.astype(jnp.int16) + 2 ** (bits - 1)).astype(jnp.uint8)
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
