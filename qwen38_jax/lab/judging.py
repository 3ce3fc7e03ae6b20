"""How good a drafter is, from captured states alone: what it would draft behind every token of given outputs.

The drafts come from the code that serves. With those of every place known, a decode over an output is followed on the
host, for any number of drafts put up for verification; for outputs of greedy decoding that is what decoding would do.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen38_jax.config import DFlash2Config, ModelConfig
from qwen38_jax.drafters.selector import make_lattice, walk
from qwen38_jax.lab.capture import Captured, Text
from qwen38_jax.lab.dflash2 import blocks_at, context_of
from qwen38_jax.layers.linear import linear
from qwen38_jax.model import logits
from qwen38_jax.params import DFlash2Params, DraftHead, Params
from qwen38_jax.sampling import mask_padding, sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.training.forward import mtp_chain

Array = jax.Array

_SHORTEST = 512  # rows that texts are padded to, then powers of two: few, since each is a program
_BLOCKS = 64  # anchors at a time


@dataclasses.dataclass(frozen=True)
class Drafts:
    """Drafts behind every anchor of one output, the anchors being its tokens but the last; NumPy arrays.

    tokens: `[n, K]`, the chain of drafts. likeliest: `[n, K]`, the first candidate of every place. among: `[n, K]`
    bool, whether the token of the text is one of the candidates. text: `[n, K]`, the tokens of the text, -1 behind it.
    """

    tokens: np.ndarray
    likeliest: np.ndarray
    among: np.ndarray
    text: np.ndarray

    @property
    def accepted(self) -> np.ndarray:
        """How many drafts of each chain agree with the text, `[n]`."""
        return _leading(self.tokens == self.text)

    @property
    def oracle(self) -> np.ndarray:
        """The same for the best choice among the candidates."""
        return _leading(self.among & (self.text >= 0))


def _leading(right: np.ndarray) -> np.ndarray:
    return np.cumprod(right, axis=1).sum(axis=1)


def follow(accepted: np.ndarray, verify_tokens: int) -> tuple[int, np.ndarray]:
    """A decode over an output: steps, and how often each place of a block was accepted, `[verify_tokens]`.

    accepted: `[n]`, by anchor; the step at one anchor emits what is accepted and one token more. The last token of the
    output is never drafted: it comes out of the row before it.
    """
    at, steps, by_place = 0, 0, np.zeros(verify_tokens, np.int64)
    while at < len(accepted):
        a = min(int(accepted[at]), verify_tokens, len(accepted) - at - 1)
        by_place[:a] += 1
        steps += 1
        at += a + 1
    return steps, by_place


Drafter = Callable[[Captured, Text], Drafts]


def mtp_drafts(
    params: Params, cfg: ModelConfig, depth: int, *, head: DraftHead | None, real_vocab_size: int
) -> Drafter:
    """Drafts of the MTP head of `params`; `head` as in `drafters.mtp.Mtp`. Candidates are the 16 likeliest."""

    def of_text(captured: Captured, text: Text) -> Drafts:
        tokens, hidden = (_padded(captured.rows(text, name)) for name in ("tokens", "hidden"))
        ids, top = _mtp_candidates(params, head, tokens, hidden.astype(cfg.dtype), cfg, depth, real_vocab_size)
        rows = slice(text.prompt - 1, text.rows - 2)  # of the anchors, the token before each
        top = np.asarray(top)[:, rows].swapaxes(0, 1)  # [n, K, candidates]
        following = _following(captured, text, depth)
        return Drafts(top[..., 0], top[..., 0], (top == following[..., None]).any(axis=-1), following)

    return of_text


@functools.partial(jax.jit, static_argnames=("cfg", "depth", "real_vocab_size"))
def _mtp_candidates(params, head, tokens, hidden, cfg, depth, real_vocab_size):
    """Drafts `[K, T]`, and the 16 likeliest ids `[K, T, 16]`, of every place of one text."""

    def likeliest(rows):  # [..., H]
        if head is None:
            return jax.lax.top_k(mask_padding(logits(params, rows), real_vocab_size), 16)[1]
        return head.ids[jax.lax.top_k(linear(rows, head.weight, jnp.float32), min(16, len(head.ids)))[1]]

    chain = mtp_chain(params, cfg, tokens[None], hidden[None], depth, lambda rows: likeliest(rows)[..., 0])
    top = likeliest(chain[:, 0])
    return top[..., 0], top


def dflash2_drafts(
    drafter: DFlash2Params, drafter_cfg: DFlash2Config, params: Params, *, real_vocab_size: int
) -> Drafter:
    """Greedy drafts of a DFlash2 drafter."""

    def of_text(captured: Captured, text: Text) -> Drafts:
        tokens, taps = (_padded(captured.rows(text, name)) for name in ("tokens", "taps"))
        anchors = np.arange(text.prompt, text.rows - 1)
        padded = np.pad(anchors, (0, -len(anchors) % _BLOCKS), mode="edge").reshape(-1, _BLOCKS)
        context = _context(drafter, taps.astype(drafter_cfg.dtype), drafter_cfg)
        found = [
            _block_candidates(drafter, params, context, tokens, group, drafter_cfg, real_vocab_size) for group in padded
        ]
        drafts, ids = (np.concatenate(t)[: len(anchors)] for t in zip(*jax.device_get(found), strict=True))
        following = _following(captured, text, drafter_cfg.block_size - 1)
        return Drafts(drafts, ids[..., 0], (ids == following[..., None]).any(axis=-1), following)

    return of_text


@functools.partial(jax.jit, static_argnames="cfg")
def _context(drafter, taps, cfg):
    return context_of(drafter, cfg, taps[None])


@functools.partial(jax.jit, static_argnames=("cfg", "real_vocab_size"))
def _block_candidates(drafter, params, context, tokens, anchors, cfg, real_vocab_size):
    """Drafts `[N, K]` and candidates `[N, K, C]` at `anchors [N]` of one text."""
    greedy = [SamplingParams(temperature=0.0, seed=0)] * len(anchors)
    sampler = sampler_state(
        greedy,
        [()] * len(greedy),
        vocab_size=cfg.vocab_size,
        real_vocab_size=real_vocab_size,
        eos_ids=(),
    )
    z = blocks_at(drafter, cfg, params, context, tokens[None], anchors[None])[0]  # [N, K, H]
    sizes = {"count": cfg.selector_top_k, "real_vocab_size": real_vocab_size}
    lattice = make_lattice(drafter.selector, z, logits(params, z), tokens[anchors], **sizes)
    chosen, _ = walk(lattice, sampler, anchors[:, None] + 1 + jnp.arange(z.shape[1]), False)
    return jnp.take_along_axis(lattice.ids, chosen[..., None], axis=2)[..., 0], lattice.ids


def _following(captured: Captured, text: Text, count: int) -> np.ndarray:
    """`[n, count]` tokens behind each anchor, -1 behind the end."""
    tokens = np.pad(captured.rows(text, "tokens"), (0, count), constant_values=-1)
    anchors = np.arange(text.prompt, text.rows - 1)
    return tokens[anchors[:, None] + 1 + np.arange(count)]


def _padded(rows: np.ndarray) -> np.ndarray:
    length = max(_SHORTEST, 1 << (len(rows) - 1).bit_length())
    return np.pad(rows, ((0, length - len(rows)),) + ((0, 0),) * (rows.ndim - 1))


def judge(
    drafter: Drafter,
    captured: Captured,
    verify_tokens: Iterable[int],
    advance: Callable[[int], object] = lambda n: None,
) -> dict[str, Any]:
    """Figures of a drafter on captured outputs, of all and by source (what stands before the first `/` of a tag).

    Returns:
      For "all" and every source: outputs, tokens; `right` and `among`, by place, how often the likeliest candidate is
      the token and how often it is a candidate at all; `chain` and `oracle`, drafts accepted from a random place on
      average, of the chain and of the best choice of candidates; for every number of `verify_tokens` the tokens per
      step and the share of steps that accept each place.
    """
    verify_tokens = list(verify_tokens)
    sums: dict[str, _Sums] = defaultdict(lambda: _Sums(verify_tokens))
    for text in captured.texts:
        if text.rows - text.prompt >= 2:
            drafts = drafter(captured, text)
            for name in ("all", text.source.partition("/")[0] or "untagged"):
                sums[name].add(drafts)
        advance(1)
    return {name: sums[name].figures() for name in sorted(sums)}


class _Sums:
    """Counts over outputs of one kind."""

    def __init__(self, verify_tokens: list[int]):
        self.outputs = self.anchors = 0
        self.steps = dict.fromkeys(verify_tokens, 0)
        self.places = {k: np.zeros(k, np.int64) for k in verify_tokens}
        self.counts: dict[str, Any] = defaultdict(int)

    def add(self, drafts: Drafts) -> None:
        self.outputs += 1
        self.anchors += len(drafts.text)
        there = drafts.text >= 0
        self.counts["there"] += there.sum(axis=0)
        self.counts["right"] += (drafts.likeliest == drafts.text).sum(axis=0)
        self.counts["among"] += (drafts.among & there).sum(axis=0)
        self.counts["chain"] += drafts.accepted.sum()
        self.counts["oracle"] += drafts.oracle.sum()
        for k in self.steps:
            steps, by_place = follow(drafts.accepted, k)
            self.steps[k] += steps
            self.places[k] += by_place

    def figures(self) -> dict[str, Any]:
        there = np.maximum(self.counts["there"], 1)
        return {
            "outputs": self.outputs,
            "tokens": self.anchors,
            "right": (self.counts["right"] / there).tolist(),
            "among": (self.counts["among"] / there).tolist(),
            "chain": float(self.counts["chain"] / self.anchors),
            "oracle": float(self.counts["oracle"] / self.anchors),
            "verify": {
                k: {
                    "tokens_per_step": self.anchors / self.steps[k],
                    "accepted": (self.places[k] / self.steps[k]).tolist(),
                }
                for k in self.steps
            },
        }
