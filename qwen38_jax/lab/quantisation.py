"""GPTQ for drafters: the rows that each of their matrices reads, and the matrices rounded by them.

The rows are those of drafting: a drafter's own forward pass over captured outputs, taken apart into the functions that
serve so that every matrix's input can be seen. An attention's or an MLP's last matrix is seen by putting the identity
in its place.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from qwen38_jax.config import DFlash2Config, ModelConfig
from qwen38_jax.drafters.dflash2 import block_attention, block_conv, block_masks, context_features, conv_kernels
from qwen38_jax.lab.dflash2 import context_of
from qwen38_jax.layers.attention import attend, output, project
from qwen38_jax.layers.linear import embed, linear
from qwen38_jax.layers.mlp import mlp
from qwen38_jax.layers.norm import plain_rms_norm, rms_norm
from qwen38_jax.layers.rope import rope_table, text_rope_table
from qwen38_jax.model import add_mlp
from qwen38_jax.params import DFlash2Params, MtpHead, Params
from qwen38_jax.quantization import QuantTensor, quantize
from qwen38_jax.quantization.gptq import Hessian, add_rows, empty_hessian, gptq

Array = jax.Array
Inputs = dict[str, Array]  # by the path of a matrix, `layers.N.` in front where it is a layer's: rows `[..., K]`

CONTEXT_ROWS = "context"  # inputs of keys and values made of the text, beside those made of the block


def dflash2_inputs(
    params: DFlash2Params, cfg: DFlash2Config, target: Params, tokens: Array, taps: Array, anchors: Array
) -> tuple[Array, Inputs]:
    """The blocks' rows `[N, block, H]` at `anchors [N]` of one text `[1, T]`, and what every matrix read for them.

    Keys and values are made of the text's rows as well: `layers.N.attention.kv.context`.
    """
    context = context_of(params, cfg, taps)
    wide = jnp.moveaxis(taps, 2, 0)
    features = context_features(params, cfg, wide)
    inputs = {"fc": jnp.moveaxis(wide, 0, 2).reshape(*tokens.shape, -1)}
    count, block = len(anchors), cfg.block_size
    masks = jnp.full((count, block - 1), cfg.mask_token_id, tokens.dtype)
    x = embed(target.embed, jnp.concatenate([tokens[0, anchors][:, None], masks], axis=1)).astype(cfg.dtype)
    positions = anchors[:, None] + jnp.arange(block)
    rope = text_rope_table(positions, cfg.head_dim, cfg.rope_theta)
    every = jax.tree.map(lambda t: jnp.broadcast_to(t, (*t.shape[:1], count, *t.shape[2:])), (context.k, context.v))
    whole = context.replace(positions=jnp.broadcast_to(context.positions, (count, *context.positions.shape[1:])))
    seen = block_masks(cfg, whole, positions, anchors)
    for n in range(cfg.num_hidden_layers):
        layer = jax.tree.map(lambda t, n=n: t[n], params.layers)
        k, v = (t[n] for t in every)

        def attention(h, layer=layer, n=n, k=k, v=v):
            inputs[f"layers.{n}.attention.q"] = inputs[f"layers.{n}.attention.kv"] = h
            inputs[f"layers.{n}.attention.kv.{CONTEXT_ROWS}"] = features
            width = layer.attention.o.shape[1]
            open_ended = layer.attention.replace(o=jnp.eye(width, dtype=h.dtype))
            inputs[f"layers.{n}.attention.o"] = block_attention(open_ended, cfg, h, rope, k, v, seen)
            return linear(inputs[f"layers.{n}.attention.o"], layer.attention.o)

        def feed_forward(h, layer=layer, n=n):
            inputs[f"layers.{n}.mlp.gate_up"] = h
            width = layer.mlp.down.shape[1]
            inputs[f"layers.{n}.mlp.down"] = mlp(layer.mlp.replace(down=jnp.eye(width, dtype=h.dtype)), h)
            return linear(inputs[f"layers.{n}.mlp.down"], layer.mlp.down)

        for norm, conv, sublayer in (
            (layer.input_norm, layer.attention_conv, attention),
            (layer.post_norm, layer.mlp_conv, feed_forward),
        ):
            h = plain_rms_norm(x, norm, cfg.rms_norm_eps)
            kernels = None if conv is None else conv_kernels(conv, cfg, h)
            h = sublayer(h if kernels is None else block_conv(h, kernels[:, :, 0]))
            x = x + (h if kernels is None else block_conv(h, kernels[:, :, 1]))
    return plain_rms_norm(x, params.norm, cfg.rms_norm_eps), inputs


def mtp_inputs(params: Params, cfg: ModelConfig, tokens: Array, hidden: Array) -> tuple[Array, Inputs]:
    """The head's rows `[1, T - 1, H]` over one text, as `forward.mtp_sequence`, and what every matrix read for them."""
    head, eps = params.mtp, cfg.rms_norm_eps
    known = rms_norm(hidden[:, :-1], head.hidden_norm, eps)
    joined = jnp.concatenate([rms_norm(embed(params.embed, tokens[:, 1:]), head.embedding_norm, eps), known], axis=-1)
    x, layer, length = linear(joined, head.fc), head.layer, tokens.shape[1] - 1
    inputs = {"fc": joined, "layer.mixer.qkv": rms_norm(x, layer.input_norm, eps)}
    rows = project(layer.mixer, cfg, inputs["layer.mixer.qkv"], rope_table(jnp.arange(length)[None], cfg))
    attended = attend(rows, jnp.tril(jnp.ones((length, length), bool))[None])
    eye = jnp.eye(layer.mixer.o.shape[1], dtype=x.dtype)
    inputs["layer.mixer.o"] = output(layer.mixer.replace(o=eye), rows, attended)
    x = x + linear(inputs["layer.mixer.o"], layer.mixer.o)
    inputs["layer.mlp.gate_up"] = rms_norm(x, layer.post_norm, eps)
    wide = layer.mlp.replace(down=jnp.eye(layer.mlp.down.shape[1], dtype=x.dtype))
    inputs["layer.mlp.down"] = mlp(wide, inputs["layer.mlp.gate_up"])
    return rms_norm(add_mlp(layer, cfg, x), head.norm, eps), inputs


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a drafter's matrices are rounded.

    Attributes:
      method: "gptq" or "rtn" (to the nearest).
      bits, group: of codes, columns that share a scale.
      keep_fc: leave the projection of the taps in floats.
      blend_context: let keys and values be calibrated on the text's rows as well as on the block's.
    """

    method: str = "gptq"
    bits: int = 4
    group: int = 128
    keep_fc: bool = False
    blend_context: bool = False

    def __post_init__(self):
        if self.method not in ("gptq", "rtn"):
            raise ValueError(f"method must be gptq or rtn, got {self.method!r}")


def calibrate(collect: Callable[..., Inputs], batches: Iterable[tuple[Array, ...]]) -> dict[str, Hessian]:
    """The second moments of all inputs over batches; `collect(*batch)` gives the inputs. Rows are those of `batch`."""
    collect, hessians = jax.jit(collect), {}
    for batch in batches:
        for name, rows in collect(*batch).items():
            hessians[name] = add_rows(hessians.get(name, empty_hessian(rows.shape[-1])), rows)
    if not hessians:
        raise ValueError("there is nothing to calibrate on")
    return hessians


def quantise_matrix(w: Array, hessian: Hessian | None, recipe: Recipe) -> QuantTensor:
    """A matrix `[N, K]` in integers, with as large groups as divide a row."""
    group = recipe.group
    while w.shape[1] % group:
        group //= 2
    if recipe.method == "rtn":
        return quantize(w, recipe.bits, group)
    return gptq(w, hessian.matrix, bits=recipe.bits, group=group, clip_search=True)[0]


def quantise_dflash2(
    params: DFlash2Params, cfg: DFlash2Config, hessians: dict[str, Hessian], recipe: Recipe
) -> DFlash2Params:
    """The drafter with the matrices of its layers, and `fc`, in integers; convolutions and selector stay."""

    def of_layers(part: str, field: str) -> QuantTensor:
        stacked = getattr(getattr(params.layers, part), field)
        return _stack(
            [
                quantise_matrix(stacked[n], _hessian(hessians, f"layers.{n}.{part}.{field}", recipe), recipe)
                for n in range(cfg.num_hidden_layers)
            ]
        )

    layers = params.layers
    layers = layers.replace(
        attention=layers.attention.replace(**{f: of_layers("attention", f) for f in ("q", "kv", "o")}),
        mlp=layers.mlp.replace(**{f: of_layers("mlp", f) for f in ("gate_up", "down")}),
    )
    fc = params.fc if recipe.keep_fc else quantise_matrix(params.fc, hessians.get("fc"), recipe)
    return params.replace(fc=fc, layers=layers)


def quantise_mtp(head: MtpHead, hessians: dict[str, Hessian], recipe: Recipe) -> MtpHead:
    """The head with its matrices in integers."""

    def of(path: str, w: Array) -> QuantTensor:
        return quantise_matrix(w, hessians.get(path), recipe)

    mixer, feed = head.layer.mixer, head.layer.mlp
    layer = head.layer.replace(
        mixer=mixer.replace(qkv=of("layer.mixer.qkv", mixer.qkv), o=of("layer.mixer.o", mixer.o)),
        mlp=feed.replace(gate_up=of("layer.mlp.gate_up", feed.gate_up), down=of("layer.mlp.down", feed.down)),
    )
    return head.replace(fc=head.fc if recipe.keep_fc else of("fc", head.fc), layer=layer)


def _hessian(hessians: dict[str, Hessian], name: str, recipe: Recipe) -> Hessian | None:
    """That of a matrix; for keys and values the mean of block's and text's, where these are to count."""
    own, of_text = hessians.get(name), hessians.get(f"{name}.{CONTEXT_ROWS}")
    if own is None or of_text is None or not recipe.blend_context:
        return own
    return Hessian((own.matrix + of_text.matrix) / 2, own.rows + of_text.rows)


def _stack(layers: list[QuantTensor]) -> Any:
    return jax.tree.map(lambda *ts: jnp.stack(ts), *layers)
