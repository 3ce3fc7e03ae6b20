"""Packed rows: what is in them, and that a block depends on nothing but its number."""

import numpy as np
import pytest

from qwen38_jax.training.dataset import (
    BLOCK_TOKENS,
    MIXTURE,
    Block,
    BlockReader,
    LineEncoder,
    Source,
    _plain_text,
    draw_block,
    load_tokenizer,
    make_source,
)
from qwen38_jax.training.tasks import EDITED_WEIGHT, TASKS

LENGTH = 1024


@pytest.fixture(scope="module")
def source(corpus, tokenizer) -> Source:
    return make_source(corpus.train, tokenizer, "3/train")


@pytest.fixture(scope="module")
def block(source) -> Block:
    return draw_block(source, LineEncoder(source.tokenizer), LENGTH, index=0)


def test_mixture_covers_all_tasks():
    assert set(MIXTURE) == {"plain/prose", "plain/code", *TASKS}
    assert sum(MIXTURE.values()) == pytest.approx(1)


def test_a_block_is_whole_rows(block):
    assert block.tokens.shape == block.weights.shape == (BLOCK_TOKENS // LENGTH, LENGTH)
    assert block.tokens.max() < 8192 and set(np.unique(block.weights)) == {0, 1, EDITED_WEIGHT}
    counts = dict(block.counts)
    assert counts.pop("dropped", 0) < 30  # longer than a row after all
    assert sum(counts.values()) == block.tokens.size


def test_shares_follow_the_mixture(source, block):
    second = draw_block(source, LineEncoder(source.tokenizer), LENGTH, index=1)
    for name, share in MIXTURE.items():
        got = (block.counts[name] + second.counts[name]) / (2 * BLOCK_TOKENS)
        assert got == pytest.approx(share, rel=0.4), name


def test_rows_hold_whole_conversations(block, tokenizer):
    start, end, stop = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    for row, weight in zip(block.tokens[:60], block.weights[:60], strict=True):
        for part in np.split(np.arange(LENGTH), np.flatnonzero(row == stop) + 1):
            starts = part[row[part] == start]
            if not len(starts):
                assert weight[part].all()  # plain text
                continue
            ids, w = row[part[part >= starts[0]]], weight[part[part >= starts[0]]]
            assert ids[-1] == stop and w[-1] == 0
            answers = tokenizer.decode(ids[w > 0], skip_special_tokens=False)
            prompts = tokenizer.decode(ids[w == 0], skip_special_tokens=False)
            assert answers.count("<|im_end|>") == prompts.count("<|im_start|>assistant\n<think>\n") >= 1
            assert answers.endswith("<|im_end|>") and prompts.endswith("\n<|endoftext|>")
            assert "<|im_start|>" not in answers


def test_blocks_drawn_ahead_are_those_drawn_here(source, block):
    with BlockReader(source, workers=2) as blocks:
        drawn = [blocks(LENGTH, i) for i in (0, 1, 4)]
        again = blocks(LENGTH, 0)  # back, as a run that is resumed
        other = blocks(LENGTH // 2, 0)
    for one, other_one in zip(block, again, strict=True):
        assert np.array_equal(one, other_one) if isinstance(one, np.ndarray) else one == other_one
    assert np.array_equal(block.tokens, drawn[0].tokens)
    rows = [row.tobytes() for part in drawn for row in part.tokens]
    assert len(set(rows)) == len(rows)
    assert other.tokens.shape == (2 * BLOCK_TOKENS // LENGTH, LENGTH // 2)


def test_another_seed_gives_other_rows(source, block):
    other = Source(source.library, source.tokenizer, source.plain, "4/train")
    rows = {row.tobytes() for row in draw_block(other, LineEncoder(source.tokenizer), LENGTH, 0).tokens}
    assert rows.isdisjoint(row.tobytes() for row in block.tokens)


def test_plain_text_continues_through_epochs():
    documents = tuple(np.full(n, n, np.uint16) for n in (3, 5, 7))
    source = Source(None, None, {"prose": documents}, "s")
    whole = _plain_text(source, "prose", 0, 45)
    for epoch in whole.reshape(3, 15):
        assert sorted(epoch) == sorted(np.concatenate(documents))
    assert np.array_equal(_plain_text(source, "prose", 11, 30), whole[11:41])
    assert len(_plain_text(source, "prose", 4, 0)) == 0


@pytest.mark.parametrize("length", [100, BLOCK_TOKENS + 1])
def test_impossible_sizes_are_refused(source, tmp_path, length):
    with pytest.raises(ValueError, match="need 128 to"):
        draw_block(source, LineEncoder(source.tokenizer), length, 0)
    with pytest.raises(ValueError, match="workers is 0"):
        BlockReader(source, 0)
    with pytest.raises(ValueError, match="train the tokenizer first"):
        load_tokenizer(tmp_path)
