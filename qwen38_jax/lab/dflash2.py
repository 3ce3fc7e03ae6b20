"""What a DFlash2 drafter is trained with: blocks at many anchors of a text in one pass, on captured layer outputs.

The blocks are made of the functions that serve (`drafters.dflash2`), all on one context that is never copied: for
attention the rows of a text's blocks stand side by side, each under the mask of its own anchor. They are worked through
some at a time, and again in the backward pass, so that neither the scores of all blocks nor their logits are ever there
at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from qwen38_jax.config import DFlash2Config, ModelConfig
from qwen38_jax.drafters.dflash2 import (
    ContextCache,
    block_attention,
    block_conv,
    block_masks,
    conv_kernels,
    extend_context,
    init_context,
)
from qwen38_jax.lab.windows import NO_ANCHOR
from qwen38_jax.layers.linear import PRECISION, embed, linear
from qwen38_jax.layers.mlp import mlp
from qwen38_jax.layers.norm import plain_rms_norm
from qwen38_jax.layers.rope import text_rope_table
from qwen38_jax.model import logits
from qwen38_jax.params import CandidateSelector, DFlash2Params, Params
from qwen38_jax.sampling import mask_padding

Array = jax.Array

WEIGHTINGS = ("decay", "d-pace")


@dataclasses.dataclass(frozen=True)
class DFlash2Loss:
    """How the drafter is trained.

    Attributes:
      weighting: how much each place of a block counts. "decay": exp(-(i - 1) / gamma) for draft i. "d-pace"
        (arXiv 2605.18810): the expected number of drafts that its being right lets through, from the drafter's own
        probabilities, smoothed by `alpha`.
      selector_weight: of the selector's loss beside that of the blocks.
      inject_gold: where the right token is not among the candidates, put it in place of the last one, in the loss
        only; else such places count for nothing in the selector's loss.
      selector_to_blocks: whether the selector's loss trains the blocks as well.
      blocks_at_once: of a text; a divisor of the number of anchors.
    """

    weighting: str = "decay"
    gamma: float = 4.0
    alpha: float = 0.5
    selector_weight: float = 1.0
    inject_gold: bool = True
    selector_to_blocks: bool = True
    blocks_at_once: int = 32

    def __post_init__(self):
        if self.weighting not in WEIGHTINGS:
            raise ValueError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {self.weighting!r}")
        if self.gamma <= 0 or not 0 <= self.alpha < 1 or self.selector_weight < 0 or self.blocks_at_once < 1:
            raise ValueError(f"gamma and blocks_at_once must be positive, alpha in [0, 1): {self}")


def default_config(
    target: ModelConfig,
    *,
    tap_layers: tuple[int, ...],
    mask_token_id: int,
    layers: int,
    intermediate: int,
    selector_rank: int = 32,
    block_size: int = 8,
    window: int = 2048,
) -> DFlash2Config:
    """A drafter for a model: its heads and sizes where nothing else is asked for."""
    return DFlash2Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        sliding_window=window,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=tap_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=selector_rank,
        selector_top_k=16,
        initializer_range=target.initializer_range,
        dtype=target.dtype,
    )


def context_of(params: DFlash2Params, cfg: DFlash2Config, taps: Array) -> ContextCache:
    """The context of whole texts, `taps [B, T, layers, H]`: every row is there, row t at position t."""
    batch, length = taps.shape[:2]
    empty = init_context(dataclasses.replace(cfg, sliding_window=length), batch)
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    return extend_context(params, cfg, empty, jnp.moveaxis(taps, 2, 0), positions, jnp.ones((batch, length), bool))


def blocks_at(
    params: DFlash2Params, cfg: DFlash2Config, target: Params, context: ContextCache, tokens: Array, anchors: Array
) -> Array:
    """The rows of the masks behind each anchor, `[B, N, drafts, H]`: they see what is before it, and their own block.

    tokens: `[B, T]`; anchors: `[B, N]` places in it.
    """
    batch, count = anchors.shape
    first = jnp.take_along_axis(tokens, anchors, axis=1)[..., None]
    masks = jnp.full((batch, count, cfg.block_size - 1), cfg.mask_token_id, tokens.dtype)
    block = jnp.concatenate([first, masks], axis=-1)
    positions = anchors[..., None] + jnp.arange(cfg.block_size)
    own_anchor = jnp.broadcast_to(anchors[..., None], positions.shape)
    block, positions, own_anchor = (t.reshape(batch, -1) for t in (block, positions, own_anchor))  # [B, N * block]
    rope = text_rope_table(positions, cfg.head_dim, cfg.rope_theta)
    sees_context, near = block_masks(cfg, context, positions, jnp.full(batch, jnp.iinfo(jnp.int32).max))
    of_block = jnp.arange(positions.shape[1]) // cfg.block_size
    seen = (
        sees_context & (context.positions[:, None, :] < own_anchor[..., None]),
        near & (of_block[:, None] == of_block),
    )

    def apart(t):  # for convolutions, which stay within a block
        return t.reshape(batch * count, cfg.block_size, -1)

    def between_convs(conv, h, sublayer):
        if conv is None:
            return sublayer(h)
        kernels = conv_kernels(conv, cfg, apart(h))
        inner = sublayer(block_conv(apart(h), kernels[:, :, 0]).reshape(h.shape))
        return block_conv(apart(inner), kernels[:, :, 1]).reshape(h.shape)

    def layer(x, weights_k_v):
        weights, k, v = weights_k_v
        h = plain_rms_norm(x, weights.input_norm, cfg.rms_norm_eps)
        attention = functools.partial(block_attention, weights.attention, cfg, rope=rope, k=k, v=v, masks=seen)
        x = x + between_convs(weights.attention_conv, h, attention)
        h = plain_rms_norm(x, weights.post_norm, cfg.rms_norm_eps)
        return x + between_convs(weights.mlp_conv, h, functools.partial(mlp, weights.mlp)), None

    x, _ = lax.scan(layer, embed(target.embed, block).astype(cfg.dtype), (params.layers, context.k, context.v))
    x = plain_rms_norm(x, params.norm, cfg.rms_norm_eps)
    return x.reshape(batch, count, cfg.block_size, -1)[:, :, 1:]


def dflash2_loss(
    drafter: DFlash2Params,
    target: Params,
    tokens: Array,
    response: Array,
    taps: Array,
    anchors: Array,
    *,
    cfg: DFlash2Config,
    settings: DFlash2Loss,
    real_vocab_size: int,
) -> tuple[Array, dict[str, Array]]:
    """Cross-entropy of the blocks' rows and of the selector's choices, weighted by place.

    Args:
      drafter: in fp32; it computes in `cfg.dtype`.
      target: as `mtp.frozen_parts` gives it.
      tokens, response: `[B, T]`; taps: `[B, T, layers, H]`.
      anchors: `[B, N]` places of output tokens; NO_ANCHOR where there is none.

    Returns:
      The loss, and: both cross-entropies; how often the first draft is right, and the token among the candidates;
      drafts accepted of a block, as the greedy walk takes them.
    """
    params = jax.tree.map(lambda p: p.astype(cfg.dtype), drafter)
    context = context_of(params, cfg, taps)
    length = tokens.shape[1]
    places = anchors[..., None] + jnp.arange(cfg.block_size)  # [B, N, block]
    inside = jnp.clip(places, 0, length - 1)
    text = jnp.take_along_axis(tokens[:, None], inside, axis=2)
    counts = jnp.take_along_axis(response[:, None], inside, axis=2)[..., 1:] > 0
    counts &= (places[..., 1:] < length) & (anchors[..., None] != NO_ANCHOR)

    @jax.checkpoint
    def of_group(group):
        anchors, text = group
        z = blocks_at(params, cfg, target, context, tokens, jnp.maximum(anchors, 0))
        return _judge(params.selector, target, z, text, settings, cfg, real_vocab_size)

    groups = jax.tree.map(lambda t: _in_groups(t, settings.blocks_at_once), (anchors, text))
    found = jax.tree.map(lambda t: _from_groups(t, counts.shape), lax.map(of_group, groups))
    weights = place_weights(found["ce"], counts, settings)
    total = jnp.maximum(jnp.sum(weights), 1e-6)
    ce = jnp.sum(found["ce"] * weights) / total
    usable = weights * found["usable"]
    selector = jnp.sum(found["selector"] * usable) / jnp.maximum(jnp.sum(usable), 1e-6)
    loss = ce + (settings.selector_weight * selector if cfg.selector_rank else 0.0)
    blocks = jnp.maximum(jnp.sum(counts[..., 0]), 1)
    places = jnp.maximum(jnp.sum(counts), 1)
    return loss, {
        "loss": loss,
        "ce": ce,
        "selector": selector,
        "right_1": jnp.sum(found["chosen"][..., 0] & counts[..., 0]) / blocks,
        "among_candidates": jnp.sum(found["among"] & counts) / places,
        "accepted": jnp.sum(jnp.cumprod(found["chosen"] & counts, axis=-1)) / blocks,
        "accepted_unary": jnp.sum(jnp.cumprod(found["likeliest"] & counts, axis=-1)) / blocks,
    }


def place_weights(ce: Array, counts: Array, settings: DFlash2Loss) -> Array:
    """How much each place of each block counts, fp32 `[..., drafts]`: zero where `counts` is false; no gradient."""
    if settings.weighting == "decay":
        weights = jnp.exp(-jnp.arange(ce.shape[-1]) / settings.gamma)
    else:
        q = (1 - settings.alpha) * jnp.exp(-lax.stop_gradient(ce)) + settings.alpha
        through = jnp.cumprod(jnp.where(counts, q, 0.0), axis=-1)
        weights = jnp.cumsum(through[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(counts, weights, 0.0)


def _judge(
    selector: CandidateSelector | None,
    target: Params,
    z: Array,
    text: Array,
    settings: DFlash2Loss,
    cfg: DFlash2Config,
    real_vocab_size: int,
) -> dict[str, Array]:
    """What each row `z [B, n, drafts, H]` is worth, given anchors and tokens `text [B, n, block]`: `[B, n, drafts]`."""
    gold, before = text[..., 1:], text[..., :-1]
    unary = mask_padding(logits(target, z), real_vocab_size)
    of_gold = jnp.take_along_axis(unary, gold[..., None], axis=-1)[..., 0]
    ce = jax.nn.logsumexp(unary, axis=-1) - of_gold
    values, ids = lax.top_k(unary, cfg.selector_top_k)
    is_gold = ids == gold[..., None]
    among = jnp.any(is_gold, axis=-1)
    found = {"ce": ce, "among": among, "likeliest": is_gold[..., 0]}
    if selector is None:
        return {**found, "selector": jnp.zeros_like(ce), "usable": among, "chosen": found["likeliest"]}
    if settings.inject_gold:
        last = jnp.arange(cfg.selector_top_k) == cfg.selector_top_k - 1
        injected = last & ~among[..., None]
        ids = jnp.where(injected, gold[..., None], ids)
        values = jnp.where(injected, of_gold[..., None], values)
        is_gold = is_gold | injected
    if not settings.selector_to_blocks:
        values, z = lax.stop_gradient((values, z))
    row = linear(z, selector.projection, jnp.float32)
    predecessor = embed(selector.predecessors, before).astype(jnp.float32)
    successors = embed(selector.successors, ids).astype(jnp.float32)
    scores = values + jnp.einsum("...r,...cr->...c", predecessor * row, successors, precision=PRECISION)
    loss = jax.nn.logsumexp(scores, axis=-1) - jnp.sum(jnp.where(is_gold, scores, 0.0), axis=-1)
    chosen = jnp.take_along_axis(is_gold, jnp.argmax(scores, axis=-1)[..., None], axis=-1)[..., 0] & among
    usable = jnp.ones_like(among) if settings.inject_gold else among
    return {**found, "selector": loss, "usable": usable, "chosen": chosen}


def _in_groups(t: Array, size: int) -> Array:
    """`[B, N, ...]` to `[N / size, B, size, ...]`."""
    batch, count = t.shape[:2]
    if count % size:
        raise ValueError(f"{count} anchors are not whole groups of {size} blocks")
    return jnp.moveaxis(t.reshape(batch, count // size, size, *t.shape[2:]), 1, 0)


def _from_groups(t: Array, shape: tuple[int, ...]) -> Array:
    return jnp.moveaxis(t, 0, 1).reshape(shape)
