"""Small models and helpers that tests share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.block import chain_block
from qwen38_jax.config import ModelConfig
from qwen38_jax.model import forward
from qwen38_jax.params import Params, cast, init_params
from qwen38_jax.state import State, StateConfig, init_state

# The architecture at its smallest: two groups of one linear and one full layer, grouped heads of both kinds,
# key and value heads of different width, a padded vocabulary.
SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    linear_per_group=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rotary_dim=4,
    rope_theta=1e7,
    mrope_section=(1, 1, 0),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    mtp_num_hidden_layers=1,
    max_position_embeddings=4096,
    initializer_range=0.3,  # large enough that greedy decoding does not degenerate
    eos_token_ids=(),
    dtype="float32",
)

run = jax.jit(forward, static_argnames=("cfg", "commit", "tap_layers"))


@functools.cache
def small_params(cfg: ModelConfig = SMALL) -> Params:
    """Random parameters in which no norm is the identity."""
    params = init_params(cfg, jax.random.key(0))
    leaves, treedef = jax.tree.flatten(params)
    noise = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [p + 0.1 * jax.random.normal(k, p.shape, p.dtype) for p, k in zip(leaves, noise, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def poisoned_state(cfg: ModelConfig, sizes: StateConfig) -> State:
    """An empty state whose free space (pages, pending rows) is NaN: whatever reads it shows."""
    state = init_state(cfg, sizes)

    def poison(t):
        return jnp.full(t.shape, jnp.nan, t.dtype) if jnp.issubdtype(t.dtype, jnp.floating) else t

    return state.replace(kv=jax.tree.map(poison, state.kv), pending=jax.tree.map(poison, state.pending))


def prompt(n: int, batch: int = 1, seed: int = 0, vocab: int = SMALL.vocab_size) -> jnp.ndarray:
    """Random tokens `[batch, n]`."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (batch, n), dtype=np.int32))


def extend(params: Params, cfg: ModelConfig, state: State, tokens, chunk: int = 0) -> tuple[jax.Array, State]:
    """Commits `tokens [B, L]`, in pieces of `chunk` (0: at once), the last padded so that one program does.

    Returns the hidden rows `[B, L, H]` and the state.
    """
    batch, n = tokens.shape
    chunk = chunk or n
    rows = []
    for at in range(0, n, chunk):
        piece = jnp.pad(tokens[:, at : at + chunk], ((0, 0), (0, max(at + chunk - n, 0))))
        valid = jnp.broadcast_to(at + jnp.arange(chunk) < n, (batch, chunk))
        hidden, _, state = run(params, cfg, chain_block(piece, state.lengths, valid), state, commit=True)
        rows.append(hidden)
    return jnp.concatenate(rows, axis=1)[:, :n], state


def assert_same_state(a: State, b: State, atol: float = 1e-4) -> None:
    """Lengths, recurrent state, convolution window and the committed part of every page agree."""
    np.testing.assert_array_equal(a.lengths, b.lengths)
    pairs = [(a.recurrent, b.recurrent), (a.conv, b.conv)]
    pairs += [(committed(a, x), committed(b, y)) for x, y in ((a.kv.k, b.kv.k), (a.kv.v, b.kv.v))]
    for x, y in pairs:
        np.testing.assert_allclose(x, y, atol=atol, rtol=atol)


def nudged(params: Params) -> Params:
    """Parameters whose embedding is off by up to half a unit in the last place, whose effect is rounding's alone."""
    noise = jax.random.uniform(jax.random.key(2), params.embed.shape, minval=-1.0, maxval=1.0)
    return params.replace(embed=params.embed * (1 + noise * 2.0**-24))


def assert_same_up_to_rounding(a: State, b: State, nudged: State, atol: float = 1e-5, factor: float = 8.0) -> None:
    """As `assert_same_state`, to `atol`, or where rounding alone makes more of a difference, to a few times that.

    nudged: what `b` is with `nudged` parameters. The deeper a layer, the more these random ones amplify the last bit;
    the first has seen no other layer, and gets no such allowance.
    """
    np.testing.assert_array_equal(a.lengths, b.lengths)
    np.testing.assert_allclose(a.recurrent[0], b.recurrent[0], atol=atol)
    np.testing.assert_allclose(a.conv[0], b.conv[0], atol=atol)
    triples = [(s.recurrent, s.conv, committed(s, s.kv.k), committed(s, s.kv.v)) for s in (a, b, nudged)]
    for x, y, z in zip(*triples, strict=True):
        for layer, (got, want, off) in enumerate(zip(x, y, z, strict=True)):
            bound = max(atol, factor * float(np.abs(np.asarray(off) - np.asarray(want)).max()))
            np.testing.assert_allclose(got, want, atol=bound, rtol=0, err_msg=f"layer {layer}")


def committed(state: State, pool) -> np.ndarray:
    """`[layers, B, longest, kv_heads, D]` of a page pool, zero beyond each sequence's length."""
    layers, _, page = pool.shape[:3]
    batch, pages = state.block_table.shape
    rows = np.asarray(pool)[:, np.asarray(state.block_table)].reshape(layers, batch, pages * page, *pool.shape[3:])
    longest = int(state.lengths.max())
    keep = np.arange(longest) < np.asarray(state.lengths)[:, None]
    return np.where(keep[None, :, :, None, None], rows[:, :, :longest], 0.0)


def with_dtype(params: Params, cfg: ModelConfig, dtype: str) -> tuple[Params, ModelConfig]:
    """The same model in another dtype."""
    cfg = dataclasses.replace(cfg, dtype=dtype)
    return cast(params, cfg), cfg
