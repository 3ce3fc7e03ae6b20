"""Packed rows: what is in them, that they are reproducible, and that damaged files are refused."""

import json
import shutil

import numpy as np
import pytest

from qwen38_jax.training.bpe import save_tokenizer
from qwen38_jax.training.dataset import (
    BLOCK_TOKENS,
    MIXTURE,
    DatasetError,
    Source,
    _plain_text,
    build,
    load,
)
from qwen38_jax.training.tasks import TASKS

LENGTH = 1024
TOKENS = BLOCK_TOKENS + 40 * LENGTH  # two blocks, the second a short one


@pytest.fixture(scope="module")
def directory(tmp_path_factory, corpus, tokenizer_dir):
    out = tmp_path_factory.mktemp("data")
    build(out, tokenizer_dir, tokens=TOKENS, sequence_length=LENGTH, seed=3, workers=1, corpus=corpus)
    return out


def test_mixture_covers_all_tasks():
    assert set(MIXTURE) == {"plain/prose", "plain/code", *TASKS}
    assert sum(MIXTURE.values()) == pytest.approx(1)


def test_manifest_describes_the_files(directory):
    for split, rows in (("train", TOKENS // LENGTH), ("held_out", TOKENS // 16 // LENGTH)):
        tokens, weights, manifest = load(directory, split)
        assert tokens.shape == weights.shape == (rows, LENGTH)
        assert tokens.max() < 8192 and set(np.unique(weights)) == {0, 1}
        counts = manifest["splits"][split]["tokens"]
        assert counts.pop("weighted") == weights.sum(dtype=np.int64)
        assert sum(counts.values()) == tokens.size
    assert sorted(p.name for p in directory.iterdir()) == sorted(
        ["manifest.json", *(f"{s}.{what}.bin" for s in ("train", "held_out") for what in ("tokens", "weights"))]
    )


def test_shares_follow_the_mixture(directory):
    _, _, manifest = load(directory)
    counts = manifest["splits"]["train"]["tokens"]
    for name, share in MIXTURE.items():
        assert counts[name] / TOKENS == pytest.approx(share, rel=0.4), name


def test_rows_hold_whole_conversations(directory, tokenizer):
    tokens, weights, _ = load(directory)
    start, end, stop = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    for row, weight in zip(tokens[:60], weights[:60], strict=True):
        for part in np.split(np.arange(LENGTH), np.flatnonzero(row == stop) + 1):
            starts = part[row[part] == start]
            if not len(starts):
                assert weight[part].all()  # plain text
                continue
            ids, w = row[part[part >= starts[0]]], weight[part[part >= starts[0]]]
            assert ids[-1] == stop and w[-1] == 0
            answers = tokenizer.decode(ids[w == 1], skip_special_tokens=False)
            prompts = tokenizer.decode(ids[w == 0], skip_special_tokens=False)
            assert answers.count("<|im_end|>") == prompts.count("<|im_start|>assistant\n<think>\n") >= 1
            assert answers.endswith("<|im_end|>") and prompts.endswith("\n<|endoftext|>")
            assert "<|im_start|>" not in answers


def test_files_do_not_depend_on_workers(directory, tmp_path, corpus, tokenizer_dir):
    build(tmp_path, tokenizer_dir, tokens=TOKENS, sequence_length=LENGTH, seed=3, workers=2, corpus=corpus)
    for path in directory.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_another_seed_gives_other_rows_and_no_row_twice(directory, tmp_path, corpus, tokenizer_dir):
    build(tmp_path, tokenizer_dir, tokens=20 * LENGTH, sequence_length=LENGTH, seed=4, workers=1, corpus=corpus)
    rows = {row.tobytes() for row in load(directory)[0]}
    assert len(rows) == TOKENS // LENGTH
    assert rows.isdisjoint(row.tobytes() for row in load(tmp_path)[0])


def test_plain_text_continues_through_epochs():
    documents = tuple(np.full(n, n, np.uint16) for n in (3, 5, 7))
    source = Source(None, None, {"prose": documents}, "s", 16)
    whole = _plain_text(source, "prose", 0, 45)
    for epoch in whole.reshape(3, 15):
        assert sorted(epoch) == sorted(np.concatenate(documents))
    assert np.array_equal(_plain_text(source, "prose", 11, 30), whole[11:41])
    assert len(_plain_text(source, "prose", 4, 0)) == 0


def test_damaged_files_are_refused(directory, tmp_path, tokenizer, tokenizer_dir):
    with pytest.raises(DatasetError, match="manifest.json is missing"):
        load(tmp_path)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    load(tmp_path, tokenizer_dir=tokenizer_dir)
    with pytest.raises(DatasetError, match="split 'test'"):
        load(tmp_path, "test")
    other = tmp_path / "other"
    save_tokenizer(tokenizer, other, 8192)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(DatasetError, match="was not made with the tokenizer"):
        load(tmp_path, tokenizer_dir=other)

    path = tmp_path / "train.weights.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=rf"train\.weights\.bin has {TOKENS - 1} bytes, the manifest says {TOKENS}"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(DatasetError, match=r"train\.weights\.bin is missing"):
        load(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))
    with pytest.raises(DatasetError, match="format 0"):
        load(tmp_path)


@pytest.mark.parametrize(("tokens", "length"), [(100, 1024), (10_000, 100)])
def test_impossible_sizes_are_refused(tmp_path, tokenizer_dir, corpus, tokens, length):
    with pytest.raises(ValueError, match="need at least|do not fill"):
        build(tmp_path, tokenizer_dir, tokens=tokens, sequence_length=length, seed=0, workers=1, corpus=corpus)
    with pytest.raises(ValueError, match="train the tokenizer first"):
        build(tmp_path, tmp_path, tokens=10_000, sequence_length=1024, seed=0, workers=1, corpus=corpus)
