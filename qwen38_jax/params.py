"""Parameters: one dataclass per layer kind, and `abstract`, the only place where their shapes are written.

Matrices keep the checkpoint's orientation `[out, in]`; each is an array or, in a quantised model, a `QuantTensor`.
Matrices with the same input are one, their rows one after the other: one product in place of several. The layers of one
kind are stacked along a leading axis, so that the forward pass is a loop over groups whatever their number.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from qwen38_jax.config import DFlash2Config, ModelConfig
from qwen38_jax.quantization import Indexed, QuantTensor, Weight

Array = jax.Array


@struct.dataclass
class Attention:
    """Gated full attention. Rows of `qkv`: of each head `head_dim` of query, then of gate; all keys; all values."""

    qkv: Weight  # [(2 * heads + 2 * kv_heads) * head_dim, hidden]
    o: Weight  # [hidden, heads * head_dim]
    q_norm: Array  # [head_dim], zero-centred
    k_norm: Array  # [head_dim], zero-centred


@struct.dataclass
class GatedDeltaNet:
    """Gated DeltaNet. Rows of `qkvz` are all queries, keys, values, and gates of the output norm, each head-major.

    `ba` reads the same input and stays apart: it has so few rows that quantisers leave it in floats.
    """

    qkvz: Weight  # [channels + value_heads * value_dim, hidden]
    ba: Weight  # [2 * value_heads, hidden], write strengths, then decays
    conv: Array  # [channels, width]; the last column multiplies the current token
    A_log: Array  # [value_heads] fp32
    dt_bias: Array  # [value_heads] fp32
    norm: Array  # [value_dim], plain weight (not zero-centred)
    out: Weight  # [hidden, value_heads * value_dim]


@struct.dataclass
class Mlp:
    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]


@struct.dataclass
class DecoderLayer:
    input_norm: Array  # [hidden], zero-centred
    mixer: Attention | GatedDeltaNet
    post_norm: Array  # [hidden], zero-centred
    mlp: Mlp


@struct.dataclass
class MtpHead:
    """Multi-token-prediction head: one attention layer that shares the embedding and the output head."""

    embedding_norm: Array  # [hidden], zero-centred
    hidden_norm: Array  # [hidden], zero-centred
    fc: Weight  # [hidden, 2 * hidden], embedding half first
    layer: DecoderLayer
    norm: Array  # [hidden], zero-centred


@struct.dataclass
class Params:
    embed: Weight  # [vocab, hidden]
    linear: DecoderLayer  # Gated DeltaNet layers, every leaf stacked: [linear layers, ...]
    full: DecoderLayer  # attention layers, every leaf stacked: [groups, ...]
    norm: Array  # [hidden], zero-centred
    lm_head: Weight | None  # [vocab, hidden]; None when the embedding is the head
    mtp: MtpHead | None


@struct.dataclass
class DraftHead:
    """Rows of the output head for the tokens that the MTP head may draft; how many is the checkpoint's choice."""

    weight: Weight  # [draft tokens, hidden]
    ids: Array  # [draft tokens] int32, the token of each row, ascending


@struct.dataclass
class BlockAttention:
    """Attention of a DFlash2 layer: no gate, plain norms. Keys and values are of context features as well."""

    q: Weight  # [heads * head_dim, hidden]
    kv: Weight  # [2 * kv_heads * head_dim, hidden], keys, then values
    o: Weight  # [hidden, heads * head_dim]
    q_norm: Array  # [head_dim]
    k_norm: Array  # [head_dim]


@struct.dataclass
class BlockConv:
    """Short convolution before and after a sublayer, within a block of drafts; its taps depend on the row."""

    base: Array  # [2 (before, after), taps, hidden]
    projection: Weight  # [2 * taps * channel groups, hidden], what the row adds to `base`


@struct.dataclass
class DFlash2Layer:
    input_norm: Array  # [hidden]
    attention_conv: BlockConv | None
    attention: BlockAttention
    post_norm: Array  # [hidden]
    mlp_conv: BlockConv | None
    mlp: Mlp


@struct.dataclass
class CandidateSelector:
    """Scores of a candidate after its predecessor, from low-rank codes of both and from the row's hidden vector."""

    projection: Weight  # [rank, hidden]
    predecessors: Array  # [vocab, rank]
    successors: Array  # [vocab, rank]


@struct.dataclass
class DFlash2Params:
    """A DFlash2 drafter. Its norms have plain weights (not zero-centred); embedding and head are the target's."""

    fc: Weight  # [hidden, tapped layers * hidden]
    hidden_norm: Array  # [hidden], of the context features
    layers: DFlash2Layer  # every leaf stacked: [layers, ...]
    norm: Array  # [hidden]
    selector: CandidateSelector | None


Initializer = Callable[[Array, tuple[int, ...], Any], Array]


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """What one parameter is before it exists.

    Attributes:
      axes: a name for each dimension, for sharding rules and for reading.
      fused: how many rows each of the matrices has that are one here; empty for a single one.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    init: Initializer
    fused: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def abstract(cfg: ModelConfig) -> Params:
    """A `Params` whose leaves are `ArrayInfo`: loading, initialisation, byte counts and tests derive from it."""
    weight = _weight(cfg)
    norm = _norm(cfg)
    return Params(
        embed=weight(("vocab", cfg.vocab_size), ("hidden", cfg.hidden_size)),
        linear=_stack(_decoder_layer(cfg, _gated_delta_net(cfg)), cfg.num_linear_layers),
        full=_stack(_decoder_layer(cfg, _attention(cfg)), cfg.num_groups),
        norm=norm(cfg.hidden_size),
        lm_head=None if cfg.tie_word_embeddings else weight(("vocab", cfg.vocab_size), ("hidden", cfg.hidden_size)),
        mtp=_mtp_head(cfg) if cfg.mtp_num_hidden_layers else None,
    )


def abstract_dflash2(cfg: DFlash2Config) -> DFlash2Params:
    """A `DFlash2Params` whose leaves are `ArrayInfo`."""
    weight = _weight(cfg)
    norm = _norm(cfg, jax.nn.initializers.ones)
    hidden = ("hidden", cfg.hidden_size)
    return DFlash2Params(
        fc=weight(hidden, ("taps", len(cfg.target_layer_ids) * cfg.hidden_size)),
        hidden_norm=norm(cfg.hidden_size),
        layers=_stack(_dflash2_layer(cfg), cfg.num_hidden_layers),
        norm=norm(cfg.hidden_size),
        selector=None if cfg.selector_rank is None else _selector(cfg),
    )


def _selector(cfg: DFlash2Config) -> CandidateSelector:
    weight = _weight(cfg)
    codes = weight(("vocab", cfg.vocab_size), ("rank", cfg.selector_rank))
    return CandidateSelector(weight(("rank", cfg.selector_rank), ("hidden", cfg.hidden_size)), codes, codes)


def _dflash2_layer(cfg: DFlash2Config) -> DFlash2Layer:
    weight = _weight(cfg)
    norm = _norm(cfg, jax.nn.initializers.ones)
    hidden, inner = ("hidden", cfg.hidden_size), cfg.intermediate_size
    queries, keys = ("heads", cfg.num_attention_heads * cfg.head_dim), cfg.num_key_value_heads * cfg.head_dim
    conv = None if cfg.conv_kernel_size is None else _block_conv(cfg)
    return DFlash2Layer(
        input_norm=norm(cfg.hidden_size),
        attention_conv=conv,
        attention=BlockAttention(
            q=weight(queries, hidden),
            kv=_fused(cfg, "kv", (keys, keys)),
            o=weight(hidden, queries),
            q_norm=norm(cfg.head_dim),
            k_norm=norm(cfg.head_dim),
        ),
        post_norm=norm(cfg.hidden_size),
        mlp_conv=conv,
        mlp=Mlp(gate_up=_fused(cfg, "gate_up", (inner, inner)), down=weight(hidden, ("mlp", inner))),
    )


def _block_conv(cfg: DFlash2Config) -> BlockConv:
    weight, hidden = _weight(cfg), ("hidden", cfg.hidden_size)
    sides, taps, groups = 2, cfg.conv_kernel_size, cfg.hidden_size // cfg.conv_group_size
    return BlockConv(
        base=dataclasses.replace(weight(("side", sides), ("tap", taps), hidden), init=_identity_conv_init),
        projection=dataclasses.replace(
            weight(("side_tap_group", sides * taps * groups), hidden), init=jax.nn.initializers.zeros
        ),
    )


def _weight(cfg: ModelConfig | DFlash2Config) -> Callable[..., ArrayInfo]:
    init = jax.nn.initializers.normal(cfg.initializer_range)

    def weight(*dims: tuple[str, int]) -> ArrayInfo:
        return ArrayInfo(tuple(n for _, n in dims), cfg.dtype, tuple(name for name, _ in dims), init)

    return weight


def _fused(cfg: ModelConfig | DFlash2Config, axis: str, rows: tuple[int, ...]) -> ArrayInfo:
    """Matrices of `rows` rows each, all of which read the hidden row."""
    return dataclasses.replace(_weight(cfg)((axis, sum(rows)), ("hidden", cfg.hidden_size)), fused=rows)


def _norm(
    cfg: ModelConfig | DFlash2Config, init: Initializer = jax.nn.initializers.zeros
) -> Callable[[int], ArrayInfo]:
    return lambda n: ArrayInfo((n,), cfg.dtype, ("norm",), init)


def _attention(cfg: ModelConfig) -> Attention:
    weight, norm = _weight(cfg), _norm(cfg)
    queries = cfg.num_attention_heads * cfg.head_dim
    keys = cfg.num_key_value_heads * cfg.head_dim
    return Attention(
        qkv=_fused(cfg, "qkv", (2 * queries, keys, keys)),
        o=weight(("hidden", cfg.hidden_size), ("heads", queries)),
        q_norm=norm(cfg.head_dim),
        k_norm=norm(cfg.head_dim),
    )


def _gated_delta_net(cfg: ModelConfig) -> GatedDeltaNet:
    weight = _weight(cfg)
    heads = cfg.linear_num_value_heads
    values = heads * cfg.linear_value_head_dim
    conv = weight(("channels", cfg.conv_channels), ("width", cfg.linear_conv_kernel_dim))
    return GatedDeltaNet(
        qkvz=_fused(cfg, "qkvz", (cfg.conv_channels, values)),
        ba=_fused(cfg, "ba", (heads, heads)),
        conv=dataclasses.replace(conv, init=_conv_init),
        # fp32 whatever the model's dtype: they sit inside exp and softplus, and there are few of them.
        A_log=ArrayInfo((heads,), "float32", ("heads",), _log_decay_init),
        dt_bias=ArrayInfo((heads,), "float32", ("heads",), jax.nn.initializers.ones),
        norm=_norm(cfg, jax.nn.initializers.ones)(cfg.linear_value_head_dim),
        out=weight(("hidden", cfg.hidden_size), ("heads", values)),
    )


def _decoder_layer(cfg: ModelConfig, mixer: Attention | GatedDeltaNet) -> DecoderLayer:
    weight, norm = _weight(cfg), _norm(cfg)
    inner = cfg.intermediate_size
    return DecoderLayer(
        input_norm=norm(cfg.hidden_size),
        mixer=mixer,
        post_norm=norm(cfg.hidden_size),
        mlp=Mlp(
            gate_up=_fused(cfg, "gate_up", (inner, inner)), down=weight(("hidden", cfg.hidden_size), ("mlp", inner))
        ),
    )


def _mtp_head(cfg: ModelConfig) -> MtpHead:
    norm = _norm(cfg)
    return MtpHead(
        embedding_norm=norm(cfg.hidden_size),
        hidden_norm=norm(cfg.hidden_size),
        fc=_weight(cfg)(("hidden", cfg.hidden_size), ("hidden", 2 * cfg.hidden_size)),
        layer=_decoder_layer(cfg, _attention(cfg)),
        norm=norm(cfg.hidden_size),
    )


def _stack(layer, n: int):
    return jax.tree.map(
        lambda info: dataclasses.replace(info, shape=(n, *info.shape), axes=("layer", *info.axes)), layer
    )


def _conv_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    bound = shape[-1] ** -0.5  # fan-in of a depthwise filter is its width
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _identity_conv_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """[..., tap, channel] that passes a row on as it is: tap 0 is the row itself."""
    return jnp.zeros(shape, dtype).at[..., 0, :].set(1)


def _log_decay_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.05, 16.0))


def layer_at(stacked, i: Array | int):
    """Layer `i` of stacked parameters. Matrices in integers stay in their stacks (`Indexed`), for kernels to find."""

    def pick(leaf):
        return Indexed(leaf, i) if isinstance(leaf, QuantTensor) else lax.dynamic_index_in_dim(leaf, i, keepdims=False)

    return jax.tree.map(pick, stacked, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))


def shapes(cfg: ModelConfig) -> Params:
    """`abstract` as `jax.ShapeDtypeStruct` leaves, for lowering without weights."""
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype)), abstract(cfg))


def init_params(cfg: ModelConfig, key: Array) -> Params:
    """Random parameters of a model; see `init_tree`."""
    return init_tree(abstract(cfg), key)


def init_tree(infos: Any, key: Array) -> Any:
    """Random arrays for a pytree of `ArrayInfo`, each leaf from its own key, so that adding a leaf changes no other."""
    infos, treedef = jax.tree_util.tree_flatten_with_path(infos)
    leaves = []
    for path, info in infos:
        name = jax.tree_util.keystr(path)
        leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        leaves.append(info.init(leaf_key, info.shape, jnp.dtype(info.dtype)))
    return jax.tree.unflatten(treedef, leaves)


def cast(params: Params, cfg: ModelConfig) -> Params:
    """The parameters in the dtypes of `abstract(cfg)`: most in `cfg.dtype`, what the recurrence needs in fp32."""
    return jax.tree.map(lambda info, p: p.astype(info.dtype), abstract(cfg), params)


def byte_count(cfg: ModelConfig) -> int:
    """Bytes of all parameters in `cfg.dtype`."""
    return sum(info.nbytes for info in jax.tree.leaves(abstract(cfg)))


def tree_bytes(tree) -> int:
    """Bytes of all arrays (or `jax.ShapeDtypeStruct`s) of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
