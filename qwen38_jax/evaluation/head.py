"""How far the scores of one output head are from those of another, on the same hidden rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.layers.linear import linear
from qwen38_jax.quantization import Weight

Array = jax.Array

_CHUNK = 256  # rows compared at a time; three times their logits, fp32, are in use


@dataclasses.dataclass(frozen=True)
class HeadDifference:
    """A head beside the exact one, over some hidden rows.

    Attributes:
      output_error: |difference of logits| / |logits| (Frobenius).
      kl: mean KL divergence of the distributions, from the exact head's, in nats.
      top1_agreement: share of the rows for which both have the same likeliest token.
    """

    output_error: float
    kl: float
    top1_agreement: float


def compare_heads(exact: Weight, other: Weight, hidden: Array, *, real_vocab_size: int) -> HeadDifference:
    """Compares two heads `[V, H]` on `hidden [rows, H]`, at least one; ids from `real_vocab_size` on are padding."""
    if not len(hidden):
        raise ValueError("there is no hidden row to compare heads on")
    sums = np.zeros(4)
    for start in range(0, len(hidden), _CHUNK):
        rows = hidden[start : start + _CHUNK]
        valid = jnp.arange(_CHUNK) < len(rows)
        rows = jnp.pad(rows, ((0, _CHUNK - len(rows)), (0, 0)))
        sums += np.asarray(_sums(exact, other, rows, valid, real_vocab_size), np.float64)
    lost, whole, kl, same = sums.tolist()
    return HeadDifference((lost / whole) ** 0.5, kl / len(hidden), same / len(hidden))


@functools.partial(jax.jit, static_argnames="real_vocab_size")
def _sums(exact: Weight, other: Weight, hidden: Array, valid: Array, real_vocab_size: int) -> Array:
    """`[4]` fp32 sums over the valid rows: squared difference, squared logits, KL, rows of equal argmax."""
    a, b = (linear(hidden, head, jnp.float32)[:, :real_vocab_size] for head in (exact, other))
    log_p, log_q = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    each = (
        jnp.sum((a - b) ** 2, axis=-1),
        jnp.sum(a**2, axis=-1),
        jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1),
        jnp.argmax(a, axis=-1) == jnp.argmax(b, axis=-1),
    )
    return jnp.stack([jnp.sum(jnp.where(valid, t, 0)) for t in each])
