"""Every kernel at the sizes it is made for: what the benchmark times and the compile check compiles."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gated_delta_net as gdn
from pallas_kernels import gated_delta_net_prefill as gdn_prefill
from pallas_kernels import int4_matmul as int4
from pallas_kernels import int8_matmul as int8
from pallas_kernels import norm_rope
from pallas_kernels import prefill_attention as prefill
from pallas_kernels import verify_attention as attention
from pallas_kernels._paged_attention import read_pages
from pallas_kernels.device import Device
from pallas_kernels.shapes import (
    BATCH_ROWS,
    CONTEXTS,
    DRAFTER_ATTENTION,
    DRAFTER_WINDOW,
    FULL_ATTENTION,
    GATED_DELTA_NET,
    INT8_MATMULS,
    MATMULS,
    PREFILL_ROWS,
    PREFILLS,
    VERIFY_ROWS,
    Attention,
    GatedDeltaNet,
    Matmul,
)

Array = jax.Array

GROUP = 128  # columns that share a scale
_MOST_SCORES = 4e9  # bytes of fp32 that a plain version may make
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
      advance: the arguments of the next call, given those of a call and its result.
      plain: the same as one writes it in JAX for speed, where that differs from the reference and fits a GPU.
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
    advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda arguments, result: arguments
    plain: Callable[..., Any] | None = None

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
        for shape in MATMULS if bits == 4 else INT8_MATMULS:
            for rows in VERIFY_ROWS if activation_bits == 16 else BATCH_ROWS:
                yield _packed_matmul(bits, activation_bits, shape, rows, device, layers)
    for dtype in ("bfloat16", "int8"):
        for tokens in CONTEXTS:
            for rows in VERIFY_ROWS:
                yield _verify_attention(FULL_ATTENTION, tokens, None, rows, dtype, device, layers)
        for rows, tokens in PREFILLS:
            yield _prefill_attention(FULL_ATTENTION, tokens, rows, dtype, device, layers)
    for rows in VERIFY_ROWS:
        yield _norm_rope(FULL_ATTENTION, rows, layers)
    for dtype in ("float32", "float16"):
        for slots, rows in ((1, 1), (1, 8), (1, 16), (1, 32), (64, 8)):
            yield _gated_delta_net(GATED_DELTA_NET, slots, rows, dtype, device, layers)
    for sequences in (1, 4):
        yield _prefill_gated_delta_net(GATED_DELTA_NET, sequences, PREFILL_ROWS, device)
    yield _verify_attention(DRAFTER_ATTENTION, DRAFTER_WINDOW, DRAFTER_WINDOW, 8, "bfloat16", device, layers)


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


def _kv_bytes(shape: Attention, tokens: int, dtype: str) -> int:
    scale_bytes = 4 * shape.kv_heads if dtype == "int8" else 0
    return 2 * tokens * (shape.kv_heads * shape.head_dim * jnp.dtype(dtype).itemsize + scale_bytes)


def _paged_cache(
    key: Array, shape: Attention, tokens: int, dtype: str, stack: int
) -> tuple[attention.PagedCache, Array]:
    """Of one sequence, and its block table."""
    keys = jax.random.split(key, 5)
    pages = tokens // shape.page
    pool = (stack, pages, shape.page, shape.kv_heads, shape.head_dim)
    if dtype == "int8":
        stored = [jax.random.randint(keys[i], pool, -127, 128, jnp.int8) for i in range(2)]
        stored += [jax.random.uniform(keys[2 + i], pool[:4], jnp.float32, 0.005, 0.02) for i in range(2)]
    else:
        stored = [jax.random.normal(keys[i], pool, dtype) for i in range(2)]
    return attention.PagedCache(*stored), jax.random.permutation(keys[4], pages).astype(jnp.int32)[None]


def _plain_attention(q, cache, layer, table, readable, own_k=(), own_v=()):
    """Gathers pages, then XLA's attention with a mask `[B, 1, L, keys]`."""
    k, v = (
        jnp.concatenate([read_pages(pool, scale, layer, table).astype(q.dtype), *own], axis=1)
        for pool, scale, own in ((cache.k, cache.k_scale, own_k), (cache.v, cache.v_scale, own_v))
    )
    return jax.nn.dot_product_attention(q, k, v, mask=readable, implementation="xla")


def _verify_attention(
    shape: Attention, tokens: int, window: int | None, rows: int, dtype: str, device: Device, layers: Layers
) -> Case:
    """One sequence of `tokens` tokens."""
    nbytes = _kv_bytes(shape, tokens, dtype)
    stack = layers(shape.layers, nbytes)

    def make(key):
        keys = jax.random.split(key, 4)
        q, k, v = (
            jax.random.normal(keys[i], (1, rows, heads, shape.head_dim), jnp.bfloat16)
            for i, heads in enumerate((shape.heads, shape.kv_heads, shape.kv_heads))
        )
        return q, k, v, *_paged_cache(keys[3], shape, tokens, dtype, stack)

    config = attention.heuristics(
        (1, shape.kv_heads, rows * shape.heads // shape.kv_heads, shape.head_dim), tokens, shape.page, device
    )

    def run(function, q, k, v, cache, table, layer):
        mask = jnp.tri(rows, dtype=bool)[None]
        lengths = jnp.full(1, tokens, jnp.int32)
        positions = None if window is None else lengths[:, None] + jnp.arange(rows)
        return function(q, k, v, mask, cache, layer, table, lengths, positions=positions, window=window)

    def plain(q, k, v, cache, table, layer):
        position, key = tokens + jnp.arange(rows)[:, None], jnp.arange(tokens + rows)
        readable = (key <= position) & (key > position - (window or tokens + rows))
        return _plain_attention(q, cache, layer, table, readable[None, None], [k], [v])

    return Case(
        f"attention_{dtype}",
        f"{shape.name}_{tokens}",
        rows,
        stack,
        make,
        functools.partial(run, functools.partial(attention.verify_attention, config=config)),
        functools.partial(run, attention.verify_attention_reference),
        nbytes=nbytes + 2 * 2 * rows * (shape.heads + shape.kv_heads) * shape.head_dim,
        operations=4 * rows * shape.heads * shape.head_dim * tokens,
        tolerance=1e-2,
        together=False,
        plain=plain,
    )


def _prefill_attention(shape: Attention, tokens: int, rows: int, dtype: str, device: Device, layers: Layers) -> Case:
    """The last `rows` of one sequence of `tokens` tokens."""
    nbytes = _kv_bytes(shape, tokens, dtype)
    stack = layers(shape.layers, nbytes)

    def make(key):
        keys = jax.random.split(key, 2)
        q = jax.random.normal(keys[0], (1, rows, shape.heads, shape.head_dim), jnp.bfloat16)
        return q, *_paged_cache(keys[1], shape, tokens, dtype, stack)

    positions = tokens - rows + jnp.arange(rows, dtype=jnp.int32)[None]

    def run(function, q, cache, table, layer):
        return function(q, cache, layer, table, positions)

    def plain(q, cache, table, layer):
        readable = jnp.arange(tokens) <= positions[..., None]
        return _plain_attention(q, cache, layer, table, readable[None])

    config = prefill.heuristics(shape.head_dim, jnp.dtype(dtype), shape.page, device)
    return Case(
        f"prefill_{dtype}",
        f"{shape.name}_{tokens}",
        rows,
        stack,
        make,
        functools.partial(run, functools.partial(prefill.prefill_attention, config=config)),
        functools.partial(run, prefill.prefill_attention_reference),
        nbytes=nbytes + 2 * 2 * rows * shape.heads * shape.head_dim,
        operations=4 * shape.heads * shape.head_dim * rows * (2 * tokens - rows + 1) // 2,
        tolerance=1e-2,
        together=False,
        plain=plain if 4 * shape.heads * rows * tokens < _MOST_SCORES else None,
    )


def _norm_rope(shape: Attention, rows: int, layers: Layers) -> Case:
    """A quarter of each head is rotated. A call includes a copy of its rows, out of a stack of projections."""
    channels, half = 2 * (shape.heads + shape.kv_heads) * shape.head_dim, shape.head_dim // 8
    nbytes = 2 * rows * shape.head_dim * (2 * shape.heads + 4 * shape.kv_heads)
    stack = layers(shape.layers, nbytes)

    def make(key):
        keys = jax.random.split(key, 3)
        angle = jax.random.uniform(keys[2], (rows, half), maxval=6.0)
        norms = jax.random.normal(keys[1], (2, shape.head_dim), jnp.bfloat16)
        return jax.random.normal(keys[0], (stack, rows, channels), jnp.bfloat16), *norms, jnp.cos(angle), jnp.sin(angle)

    def run(function, qkv, q_norm, k_norm, cos, sin, layer):
        return function(qkv[layer], q_norm, k_norm, cos, sin, heads=shape.heads, kv_heads=shape.kv_heads, eps=1e-6)

    reference = functools.partial(run, norm_rope.split_norm_rope_reference)
    return Case(
        "norm_rope",
        shape.name,
        rows,
        stack,
        make,
        functools.partial(run, norm_rope.split_norm_rope),
        reference,
        nbytes=nbytes,
        operations=10 * rows * shape.head_dim * (shape.heads + shape.kv_heads),
        tolerance=4e-3,  # of rounding the result to bf16
        together=False,
        plain=reference,
    )


def _gated_delta_net(shape: GatedDeltaNet, slots: int, rows: int, dtype: str, device: Device, layers: Layers) -> Case:
    """A chain of rows for each of several sequences, after one of which all but the last row were accepted."""
    heads, key_heads, keys, values = shape.value_heads, shape.key_heads, shape.key_dim, shape.value_dim
    state_bytes = slots * heads * keys * values * jnp.dtype(dtype).itemsize
    row_bytes = 4 * slots * rows * (key_heads * keys + heads * values + heads)  # pending, and as many new ones
    stack = layers(shape.layers, state_bytes)

    def make(key):
        key = iter(jax.random.split(key, 9))

        def normal(*shape):
            return jax.random.normal(next(key), shape)

        def unit(*shape):
            x = normal(*shape)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        block = gdn.Rows(
            q=unit(slots, rows, key_heads, keys) * keys**-0.5,
            k=unit(slots, rows, key_heads, keys),
            v=normal(slots, rows, heads, values),
            g=-jnp.exp(normal(slots, rows, heads)),
            beta=jax.nn.sigmoid(normal(slots, rows, heads)),
        )
        pending = gdn.Pending(
            key=unit(stack, slots, rows, key_heads, keys),
            delta=normal(stack, slots, rows, heads, values),
            log_decay=-jnp.cumsum(jnp.exp(normal(stack, slots, rows, heads)), axis=2),
        )
        return block, normal(stack, slots, heads, keys, values).astype(dtype), pending

    def run(function, block, state, pending, layer):
        mask = jnp.broadcast_to(jnp.tri(rows, dtype=bool), (slots, rows, rows))
        path = jnp.broadcast_to(jnp.arange(rows) < max(1, rows - 1), (slots, rows))
        return function(block, mask, state, layer, pending, path)

    config = gdn.heuristics((slots, heads, values, rows))
    return Case(
        f"gdn_{dtype}",
        f"{slots}_slots",
        rows,
        stack,
        make,
        functools.partial(run, functools.partial(gdn.verify_gated_delta_net, config=config)),
        functools.partial(run, gdn.verify_gated_delta_net_reference),
        nbytes=2 * state_bytes + 3 * row_bytes,
        operations=2 * slots * heads * keys * values * 3 * rows,
        tolerance=1e-4 if dtype == "float32" else 1e-3,
        together=False,
        advance=lambda arguments, result: (arguments[0], result.state, arguments[2]),
    )


def _prefill_gated_delta_net(shape: GatedDeltaNet, sequences: int, rows: int, device: Device) -> Case:
    """As many rows of each of several sequences."""
    heads, key_heads, keys, values = shape.value_heads, shape.key_heads, shape.key_dim, shape.value_dim

    def make(key):
        keys_of = jax.random.split(key, 6)

        def normal(i, *shape, dtype="bfloat16"):
            return jax.random.normal(keys_of[i], (sequences, *shape), dtype)

        q, k = (normal(i, rows, key_heads, keys) for i in range(2))
        g, beta = (normal(i, rows, heads, dtype="float32") for i in (3, 4))
        state = normal(5, heads, keys, values, dtype="float32")
        return q, k, normal(2, rows, heads, values), -jnp.exp(g), jax.nn.sigmoid(beta), state

    def run(function, q, k, v, g, beta, state, layer):
        return function(q, k, v, g, beta, jnp.ones(g.shape[:2], bool), state)

    config = gdn_prefill.heuristics(values, device)
    return Case(
        "prefill_gdn",
        f"{sequences}_sequences",
        rows,
        1,
        make,
        functools.partial(run, functools.partial(gdn_prefill.prefill_gated_delta_net, config=config)),
        functools.partial(run, gdn_prefill.prefill_gated_delta_net_reference),
        nbytes=sequences * (2 * rows * 2 * (key_heads * keys + heads * values) + 2 * 4 * heads * keys * values),
        # The recurrence in chunks of C rows: three products with the state, and four of a chunk's rows with each other.
        operations=2 * sequences * rows * heads * (3 * keys * values + gdn_prefill.CHUNK * (keys + values)),
        tolerance=5e-3,
        together=False,
        advance=lambda arguments, result: (*arguments[:-1], result.state),
    )
