"""Tensor-core instructions over arrays `[warps, 128]` of 32-bit words, each with a twin in jnp.

A row of such an array is a warp: lane l holds words 4 l to 4 l + 3. Triton gives an array of this shape exactly that
layout, so four words of every operand reach one piece of inline assembly together, and that may be a matrix product of
the whole warp. Below, lane 4 g + t is written (g, t), with g = 0..7 and t = 0..3, as in NVIDIA's PTX manual.

One instruction multiplies a 16 x k tile A by a k x 8 tile B and adds to a 16 x 8 tile C. Weights are A, sixteen output
channels, and activations are B, eight tokens: the other way round a block of eight tokens would fill half a tile.

        A: 4 words a lane                  B: 2 words a lane            C: 4 words a lane
        columns t   columns t              token g                      tokens 2 t, 2 t + 1
               of the     of the     k   +--------------+             +----------+
               first half second half    | word 0       | first half  | words    |
    row g      word 0     word 2         | word 1       | second half | 0  1     | row g
    row g + 8  word 1     word 3         +--------------+             | 2  3     | row g + 8
                                                                      +----------+

"Columns t" are two values of 16 bits or four of 8: the t-th pair or quadruple of a half. The order of the columns is
ours to choose, as long as A and B agree; the packers (`_packed_matmul`) choose one in which a lane finds its columns
side by side, and which suits both widths.

Interpreting cannot run assembly. With `interpret=True` a wrapper computes the same words with jnp, so that everything
around it, packing, addressing, schedule and masks, is tested on any machine. A test on a GPU compares the two.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

Array = jax.Array

HIGHEST = lax.Precision.HIGHEST
_LETTER = {"float32": "f", "int32": "r"}  # of the assembly's constraints: a register of either kind


def _assembly(code: str, args: Sequence[Array], dtype: str) -> Array:
    """One result `[warps, 128]`: `$0` to `$3` are its words in a lane, `$4` on those of the arguments, four each."""
    # "&": a result may be written before the last argument is read, so they must not share a register.
    constraints = ["=&" + _LETTER[dtype]] * 4 + [_LETTER[a.dtype.name] for a in args for _ in range(4)]
    [result] = triton.elementwise_inline_asm(
        code,
        args=args,
        constraints=",".join(constraints),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return result


# Words of 16-bit values, two each, the first in the low half.


def nibbles_to_16bit(words: Array, index: int, dtype: str, *, interpret: bool) -> Array:
    """The eight 4-bit codes of word `index`, as the four words of an A tile whose values are code - 8, exactly.

    Codes i and i + 4 of the word, counted from its lowest bits, become the low and the high half of word i.

    Args:
      words: int32 `[warps, 128]`.
      index: which of a lane's four words.
      dtype: "bfloat16" or "float16", of the result's halves.
    """
    if interpret:
        return _nibbles_twin(words, index, dtype)
    source = f"${4 + index}"
    if dtype == "bfloat16":
        # Below the exponent of 128 a code is a fraction: 0x4300 | code = 128 + code. There are no bf16 additions before
        # compute capability 9.0, so 136 is subtracted by a multiplication with one.
        code = f"""{{
            .reg .b32 s, one, bias, a, b, c, d;
            mov.b32 one, 0x3f803f80; mov.b32 bias, 0xc308c308;
            lop3.b32 a, {source}, 0x000f000f, 0x43004300, 0xea;
            shr.u32 s, {source}, 4;  lop3.b32 b, s, 0x000f000f, 0x43004300, 0xea;
            shr.u32 s, {source}, 8;  lop3.b32 c, s, 0x000f000f, 0x43004300, 0xea;
            shr.u32 s, {source}, 12; lop3.b32 d, s, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, bias; fma.rn.bf16x2 $1, b, one, bias;
            fma.rn.bf16x2 $2, c, one, bias; fma.rn.bf16x2 $3, d, one, bias;
        }}"""
    else:
        # 0x6400 | code = 1024 + code, and one nibble further up 1024 + 16 code, which saves two shifts.
        code = f"""{{
            .reg .b32 s, bias, sixteenth, bias16, a, b, c, d;
            mov.b32 bias, 0xe408e408; mov.b32 sixteenth, 0x2c002c00; mov.b32 bias16, 0xd480d480;
            shr.u32 s, {source}, 8;
            lop3.b32 a, {source}, 0x000f000f, 0x64006400, 0xea; lop3.b32 b, {source}, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 c, s, 0x000f000f, 0x64006400, 0xea;        lop3.b32 d, s, 0x00f000f0, 0x64006400, 0xea;
            add.rn.f16x2 $0, a, bias; fma.rn.f16x2 $1, b, sixteenth, bias16;
            add.rn.f16x2 $2, c, bias; fma.rn.f16x2 $3, d, sixteenth, bias16;
        }}"""
    return _assembly(code, [words], "int32")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _nibbles_twin(words: Array, index: int, dtype: str) -> Array:
    word = _lanes(words)[..., index]
    codes = word[..., None] >> jnp.arange(0, 32, 4) & 15
    values = (codes - 8).astype(dtype).reshape(*word.shape, 2, 4).swapaxes(-1, -2)
    return lax.bitcast_convert_type(values, jnp.int32).reshape(words.shape)


def bytes_to_16bit(words: Array, index: int, dtype: str, *, interpret: bool) -> Array:
    """The eight signed bytes of words `2 index` and `2 index + 1`, as the four words of an A tile, exactly.

    Bytes 0 and 2 of a word become a word of the tile's first half, bytes 1 and 3 one of its second half.

    Args:
      words: int32 `[warps, 128]`.
      dtype: "bfloat16" or "float16", of the result's halves.
    """
    if interpret:
        return _bytes_twin(words, index, dtype)
    sources = (f"${4 + 2 * index}", f"${5 + 2 * index}")
    if dtype == "bfloat16":
        # Below the exponent of 128 the low seven bits are a fraction: 128 + low. The value is low, or low - 128 if the
        # sign is set, and -128 and -256, the two numbers to add, differ in just the bit where the sign is.
        convert = """
            lop3.b32 v, {0}, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, {0}, 0x00800080, 0xc300c300, 0x6a;
            fma.rn.bf16x2 {1}, v, one, b;"""
        constants = "mov.b32 one, 0x3f803f80;"
    else:
        # 0x6400 | byte = 1024 + byte, of the byte plus 128, which is the byte with its sign turned.
        convert = "lop3.b32 v, {0}, 0x00ff00ff, 0x64806480, 0x6a; add.rn.f16x2 {1}, v, b;"
        constants = "mov.b32 b, 0xe480e480;"
    code = "{ .reg .b32 s, v, b, one; " + constants
    for row, source in enumerate(sources):
        code += convert.format(source, f"${row}") + f"shr.u32 s, {source}, 8;" + convert.format("s", f"${2 + row}")
    return _assembly(code + "}", [words], "int32")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _bytes_twin(words: Array, index: int, dtype: str) -> Array:
    codes = lax.bitcast_convert_type(_lanes(words)[..., 2 * index : 2 * index + 2], jnp.int8)  # [W, g, t, row, byte]
    values = codes.reshape(*codes.shape[:-1], 2, 2).astype(dtype)  # byte = 2 * value + half
    values = values.transpose(0, 1, 2, 5, 3, 4)  # [W, g, t, half, row, value]
    return lax.bitcast_convert_type(values, jnp.int32).reshape(words.shape)


def nibbles_to_bytes(words: Array, index: int, *, interpret: bool) -> Array:
    """The codes of words `2 index` and `2 index + 1`, as the four words of an A tile of bytes, 16 (code - 8) each.

    The even nibbles of a word are four bytes of row g, the odd ones four of row g + 8.
    """
    if interpret:
        return _nibbles_to_bytes_twin(words, index)
    first, second = f"${4 + 2 * index}", f"${5 + 2 * index}"
    # In the high half of a byte a code is 16 code, and turning the highest bit takes 128 away.
    code = f"""{{
        .reg .b32 u, v; shl.b32 u, {first}, 4; shl.b32 v, {second}, 4;
        lop3.b32 $0, u, 0xf0f0f0f0, 0x80808080, 0x6a; lop3.b32 $1, {first}, 0xf0f0f0f0, 0x80808080, 0x6a;
        lop3.b32 $2, v, 0xf0f0f0f0, 0x80808080, 0x6a; lop3.b32 $3, {second}, 0xf0f0f0f0, 0x80808080, 0x6a;
    }}"""
    return _assembly(code, [words], "int32")


@functools.partial(jax.jit, static_argnums=1)
def _nibbles_to_bytes_twin(words: Array, index: int) -> Array:
    pair = _lanes(words)[..., 2 * index : 2 * index + 2]
    codes = pair[..., None] >> jnp.arange(0, 32, 4) & 15  # [W, g, t, word, nibble]
    values = (16 * (codes - 8)).astype(jnp.int8).reshape(*pair.shape, 4, 2).swapaxes(-1, -2)
    return lax.bitcast_convert_type(values, jnp.int32).reshape(words.shape)


def mma_16bit(a0: Array, a1: Array, b: Array, c: Array, dtype: str, *, interpret: bool) -> Array:
    """`c + A0 B0 + A1 B1`, 16 columns each, where B0 is words 0 and 1 of `b` and B1 is words 2 and 3.

    Args:
      a0, a1, b: int32 `[warps, 128]`, pairs of `dtype`, "bfloat16" or "float16".
      c: fp32 `[warps, 128]`.
    """
    if interpret:
        return _mma_twin([a0, a1], b, c, dtype, 0)
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{_PTX_TYPE[dtype]}.{_PTX_TYPE[dtype]}.f32"
    code = f"""{{
        .reg .f32 d0, d1, d2, d3;
        {mma} {{d0, d1, d2, d3}}, {{$4, $5, $6, $7}}, {{$12, $13}}, {{$16, $17, $18, $19}};
        {mma} {{$0, $1, $2, $3}}, {{$8, $9, $10, $11}}, {{$14, $15}}, {{d0, d1, d2, d3}};
    }}"""
    return _assembly(code, [a0, a1, b, c], "float32")


_PTX_TYPE = {"bfloat16": "bf16", "float16": "f16"}


@functools.partial(jax.jit, static_argnums=(3, 4))
def _mma_twin(tiles: Sequence[Array], b: Array, c: Array, dtype: str, first: int) -> Array:
    """`tiles` are A, each with as many columns as two words of B have rows, from pair `first` of them on."""
    wide = jnp.int32 if dtype == "int8" else jnp.float32
    total = _c_tile(c)
    for i, a in enumerate(tiles, start=first):
        product = jnp.einsum(
            "wik,wkj->wij", _a_tile(a, dtype).astype(wide), _b_tile(b, i, dtype).astype(wide), precision=HIGHEST
        )
        total = total + product
    return _c_words(total)


def mma_int8(a: Array, b: Array, index: int, c: Array, *, interpret: bool) -> Array:
    """`c + A B`, 32 columns, where B is words `2 index` and `2 index + 1` of `b`.

    Args:
      a, b: int32 `[warps, 128]`, four bytes each.
      c: int32 `[warps, 128]`.
    """
    if interpret:
        return _mma_twin([a], b, c, "int8", index)
    code = f"""mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
        {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{${8 + 2 * index}, ${9 + 2 * index}}}, {{$12, $13, $14, $15}};"""
    return _assembly(code, [a, b, c], "int32")


def add_scaled(c: Array, scales: Array, index: int, total: Array, dtype: str, *, interpret: bool) -> Array:
    """`total + scale * c`, where rows g and g + 8 of the tile `c` have the scales in word `index` of `scales`.

    Args:
      c, total: fp32 `[warps, 128]`.
      scales: int32 `[warps, 128]`, pairs of `dtype`: of row g, and of row g + 8.
    """
    if interpret:
        return total + c * _scale_words(scales, index, dtype)
    code = f"""{{
        .reg .f32 lo, hi; {_unpack_scales(f"${8 + index}", dtype)}
        fma.rn.f32 $0, $4, lo, $12; fma.rn.f32 $1, $5, lo, $13;
        fma.rn.f32 $2, $6, hi, $14; fma.rn.f32 $3, $7, hi, $15;
    }}"""
    return _assembly(code, [c, scales, total], "float32")


# A sum of integers that starts here is an fp32 number when read as one: 1.5 * 2^23 plus the sum, if that is below 2^22.
INTEGER_ZERO = 0x4B400000
_INTEGER_BIAS = 12582912.0


def add_scaled_integers(c: Array, scales: Array, index: int, total: Array, dtype: str, *, interpret: bool) -> Array:
    """`add_scaled` for int32 `c`, sums that started at `INTEGER_ZERO` and stayed within 2^22 of it."""
    if interpret:
        c = lax.bitcast_convert_type(c, jnp.float32) - _INTEGER_BIAS
        return total + c * _scale_words(scales, index, dtype)
    code = f"""{{
        .reg .f32 lo, hi, a, b, c, d; {_unpack_scales(f"${8 + index}", dtype)}
        mov.b32 a, $4; mov.b32 b, $5; mov.b32 c, $6; mov.b32 d, $7;
        add.rn.f32 a, a, 0fcb400000; add.rn.f32 b, b, 0fcb400000;
        add.rn.f32 c, c, 0fcb400000; add.rn.f32 d, d, 0fcb400000;
        fma.rn.f32 $0, a, lo, $12; fma.rn.f32 $1, b, lo, $13; fma.rn.f32 $2, c, hi, $14; fma.rn.f32 $3, d, hi, $15;
    }}"""
    return _assembly(code, [c, scales, total], "float32")


def _unpack_scales(word: str, dtype: str) -> str:
    """Code that sets the fp32 registers lo and hi to the two halves of a word."""
    if dtype == "bfloat16":  # the high half of an fp32 value
        return f".reg .b32 l, h; shl.b32 l, {word}, 16; and.b32 h, {word}, 0xffff0000; mov.b32 lo, l; mov.b32 hi, h;"
    return f".reg .b16 l, h; mov.b32 {{l, h}}, {word}; cvt.f32.f16 lo, l; cvt.f32.f16 hi, h;"


@functools.partial(jax.jit, static_argnums=(1, 2))
def _scale_words(scales: Array, index: int, dtype: str) -> Array:
    """fp32 `[warps, 128]`: for each word of a C tile the scale of its row."""
    rows = lax.bitcast_convert_type(_lanes(scales)[..., index], dtype).astype(jnp.float32)  # [W, g, t, 2]
    return jnp.repeat(rows, 2, axis=-1).reshape(scales.shape)


# Tiles <-> words, for the twins.


def _lanes(x: Array) -> Array:
    """`[warps, 128] -> [warps, g, t, 4]`."""
    return x.reshape(x.shape[0], 8, 4, 4)


def _a_tile(words: Array, dtype: str) -> Array:
    values = lax.bitcast_convert_type(_lanes(words), dtype)  # [W, g, t, word, values]
    w, g, t, _, v = values.shape
    values = values.reshape(w, g, t, 2, 2, v)  # word = 2 * half + row // 8
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(w, 16, 2 * t * v)


def _b_tile(words: Array, pair: int, dtype: str) -> Array:
    values = lax.bitcast_convert_type(_lanes(words)[..., 2 * pair : 2 * pair + 2], dtype)  # [W, g, t, half, values]
    w, g, t, half, v = values.shape
    return values.transpose(0, 3, 2, 4, 1).reshape(w, half * t * v, g)


def _c_tile(words: Array) -> Array:
    w = words.shape[0]
    return words.reshape(w, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(w, 16, 8)


def _c_words(tile: Array) -> Array:
    w = tile.shape[0]
    return tile.reshape(w, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(w, 128)
