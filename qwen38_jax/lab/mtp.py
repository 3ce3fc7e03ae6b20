"""What the MTP head is trained with: cross-entropy or divergence of its chained rows, on captured hidden states."""

import dataclasses

import jax
import jax.numpy as jnp

from qwen38_jax.config import ModelConfig
from qwen38_jax.layers.linear import linear, rows_of
from qwen38_jax.params import MtpHead, Params
from qwen38_jax.training.forward import mtp_chain

Array = jax.Array

LOSSES = ("ce", "kl")


@dataclasses.dataclass(frozen=True)
class MtpLoss:
    """How the head is trained.

    Attributes:
      kind: "ce", against the text's own tokens; "kl", of the model's distribution from the head's.
      depth_weights: of the depths that are unrolled, from the first draft on.
    """

    kind: str = "ce"
    depth_weights: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        if self.kind not in LOSSES:
            raise ValueError(f"the loss must be one of {', '.join(LOSSES)}, got {self.kind!r}")
        if not self.depth_weights or not all(0 < w < float("inf") for w in self.depth_weights):
            raise ValueError(f"weights of depths must be positive numbers, one at least: got {self.depth_weights}")


def frozen_parts(params: Params) -> Params:
    """What a drafter shares with the model, embedding and output head, and nothing else."""
    return Params(embed=params.embed, linear=None, full=None, norm=None, lm_head=params.lm_head, mtp=None)


def mtp_loss(
    head: MtpHead,
    target: Params,
    tokens: Array,
    hidden: Array,
    response: Array,
    *,
    cfg: ModelConfig,
    settings: MtpLoss,
    vocabulary: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The weighted mean over depths of the mean over what is drafted in serving: output tokens after output tokens.

    Args:
      head: in fp32; it computes in `cfg.dtype`.
      target: as `frozen_parts` gives it.
      tokens, response: `[B, T]`; hidden: `[B, T, H]`.
      vocabulary: `[n]` ids that may be drafted, ascending; what is not among them counts for nothing, and both
        distributions are over them. None for all.

    Returns:
      The loss; by depth the loss and how often the likeliest draft is the token, and drafts accepted of a chain.
    """
    params = target.replace(mtp=jax.tree.map(lambda p: p.astype(cfg.dtype), head))
    depth = len(settings.depth_weights)
    rows = mtp_chain(params, cfg, tokens, hidden.astype(cfg.dtype), depth)
    matrix = params.embed if params.lm_head is None else params.lm_head
    matrix = matrix if vocabulary is None else rows_of(matrix, vocabulary)
    ids = jnp.arange(cfg.vocab_size) if vocabulary is None else vocabulary
    place = jnp.full(cfg.vocab_size, len(ids)).at[ids].set(jnp.arange(len(ids)))  # len(ids): not among them
    begins = _ahead(response, 1) > 0  # the token after t, which is the anchor, is an output token
    total, parts, chain = 0.0, {}, 1.0
    for d in range(1, depth + 1):
        label = place[_ahead(tokens, 1 + d)]
        weight = (begins & (_ahead(response, 1 + d) > 0) & (label < len(ids))).astype(jnp.float32)

        @jax.checkpoint  # logits are as many as the vocabulary for every row: not kept
        def judge(row, known, label, matrix=matrix):
            log_q = jax.nn.log_softmax(linear(row, matrix, jnp.float32), axis=-1)
            loss = -jnp.take_along_axis(log_q, jnp.minimum(label, len(ids) - 1)[..., None], axis=-1)[..., 0]
            if settings.kind == "kl":
                log_p = jax.nn.log_softmax(linear(known, matrix, jnp.float32), axis=-1)
                loss = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
            return loss, jnp.argmax(log_q, axis=-1) == label

        loss, right = judge(rows[d - 1], _ahead(hidden, d).astype(cfg.dtype), label)
        count = jnp.maximum(jnp.sum(weight), 1.0)
        mean = jnp.sum(loss * weight) / count
        chain = chain * right
        parts |= {f"loss_{d}": mean, f"right_{d}": jnp.sum(right * weight) / count}
        parts["accepted"] = parts.get("accepted", 0.0) + jnp.sum(chain * weight) / count
        total = total + settings.depth_weights[d - 1] * mean
    total = total / sum(settings.depth_weights)
    return total, {"loss": total, **parts}


def _ahead(t: Array, n: int) -> Array:
    """`[B, T, ...]` whose row i is row i + n; zeros beyond the end."""
    return jnp.pad(t, ((0, 0), (0, n)) + ((0, 0),) * (t.ndim - 2))[:, n:]
