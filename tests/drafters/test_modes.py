"""Names of modes: defaults, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from qwen38_jax.drafters.modes import cut_draft_head, make_drafter
from qwen38_jax.quantization import LAYOUTS, in_rows, quantize
from qwen38_jax.tree import Tree
from tests.drafters.dflash2_golden import CFG
from tests.models import small_params

DFLASH2 = (None, CFG)
TREE = Tree(((0,), (1,), (0, 0)))


@pytest.mark.parametrize(
    ("mode", "options", "drafts", "verified"),
    [
        ("mtp", {}, 4, 4),
        ("mtp", {"draft_tokens": 7, "verify_tokens": 7}, 7, 7),
        ("lookup", {}, 0, 15),
        ("lookup", {"verify_tokens": 3}, 0, 3),
        ("mtp+lookup", {}, 4, 15),
        ("mtp+lookup", {"draft_tokens": 3, "verify_tokens": 3}, 3, 3),
        ("dflash2", {"dflash2": DFLASH2}, 7, 7),
        ("dflash2", {"dflash2": DFLASH2, "draft_tokens": 7, "verify_tokens": 3}, 7, 3),
        ("dflash2+lookup", {"dflash2": DFLASH2}, 7, 15),
        ("mtp", {"tree": TREE}, 3, 3),
        ("dflash2", {"dflash2": DFLASH2, "tree": TREE}, 7, 3),
    ],
)
def test_sizes(mode, options, drafts, verified):
    drafter, spec = make_drafter(mode, small_params(), **options)
    assert (drafter.draft_tokens, spec.verify_tokens, spec.lookup) == (drafts, verified, "lookup" in mode)


def test_none_is_nothing():
    assert make_drafter("none", small_params()) is None


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("eagle", {}, "must be one of none, mtp"),
        ("dflash2+lookup", {}, "needs a DFlash2 drafter"),
        ("none", {"tree": TREE}, "choose a mode"),
        ("mtp+lookup", {"tree": TREE}, "for modes mtp and dflash2"),
        ("mtp", {"tree": TREE, "draft_tokens": 3}, "says itself how many"),
        ("mtp", {"dflash2": DFLASH2}, "no use for a DFlash2 drafter"),
        ("dflash2", {"dflash2": DFLASH2, "draft_tokens": 4}, "blocks of 7 tokens, got 4"),
        ("dflash2", {"dflash2": DFLASH2, "verify_tokens": 8}, "more than the 7"),
        ("none", {"verify_tokens": 3}, "choose a mode"),
        ("lookup", {"draft_tokens": 3}, "takes verify_tokens"),
        ("lookup", {"verify_tokens": 0}, "at least 1"),
        ("lookup", {"verify_tokens": 32}, "at most 31"),
        ("mtp", {"draft_tokens": 0}, "at least 1"),
        ("mtp", {"verify_tokens": 5}, "more than the 4"),
        ("mtp+lookup", {"verify_tokens": 3}, "at least 4"),
    ],
)
def test_what_cannot_be_done_is_named(mode, options, words):
    with pytest.raises(ValueError, match=words):
        make_drafter(mode, small_params(), **options)


def test_a_checkpoint_without_the_head():
    headless = dataclasses.replace(small_params(), mtp=None)
    with pytest.raises(ValueError, match="has none"):
        make_drafter("mtp", headless)


def test_rows_are_cut_from_a_head_whatever_its_layout():
    head = quantize(jax.random.normal(jax.random.key(0), (130, 64)), 8, 64)
    params = dataclasses.replace(small_params(), lm_head=head)
    packed = dataclasses.replace(params, lm_head=LAYOUTS["mma"].pack(head))
    ids = [0, 63, 64, 129]
    a, b = (cut_draft_head(p, ids, vocab_size=130) for p in (params, packed))
    assert (a.weight.layout, b.weight.layout, b.weight.shape) == ("rows", "mma", (4, 64))
    np.testing.assert_array_equal(a.weight.codes, head.codes[np.array(ids)])
    jax.tree.map(np.testing.assert_array_equal, in_rows(b.weight), a.weight)
