"""Recounting the draft vocabulary: exact, mergeable, deterministic, and quick on a large corpus."""

import json
import time

import numpy as np
import pytest

from qwen38_jax.checkpoint.draft_ids import read_vocabulary
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.lab.draft_vocab import choose_ids, compare_lists, count_files, count_ids, coverage, coverage_by_size
from qwen38_jax.lab.outputs import Output, open_outputs
from scripts.recount_draft_vocab import always_drafted, main
from tests.golden import DATA, needs_golden

V = 100


def output(index, ids, source="", prompt=(1,)):
    return Output(index, source, tuple(prompt), tuple(ids), "stop", 0)


def write(path, outputs, vocab_size=V):
    with open_outputs(path, {"vocab_size": vocab_size}) as file:
        file.append(outputs)
    return path


def test_outputs_are_counted_and_prompts_only_on_request():
    outputs = [output(0, [5, 5, 7], prompt=[9, 5]), output(1, [7])]
    counts = count_ids(outputs, V)
    assert {i: int(counts[i]) for i in np.flatnonzero(counts)} == {5: 2, 7: 2}
    counts = count_ids(outputs, V, prompts=True)
    assert {i: int(counts[i]) for i in np.flatnonzero(counts)} == {5: 3, 7: 2, 1: 1, 9: 1}


def test_counts_of_shards_add_up(tmp_path):
    rng = np.random.default_rng(0)
    outputs = [output(i, rng.integers(0, V, 50).tolist()) for i in range(20)]
    shards = [write(tmp_path / f"{n}.jsonl", outputs[n::3]) for n in range(3)]
    total, tokens = count_files(shards, V)
    np.testing.assert_array_equal(total, count_ids(outputs, V))
    assert list(tokens.values()) == [350, 350, 300]


def test_choice_is_by_count_then_id_and_keeps_what_is_always_drafted():
    counts = np.zeros(V, np.int64)
    counts[[3, 10, 20, 30]] = [5, 2, 2, 9]
    assert choose_ids(counts, 4, [99]).tolist() == [3, 10, 30, 99]
    assert choose_ids(counts, 7, [99]).tolist() == [0, 1, 3, 10, 20, 30, 99]  # never counted: the lowest ids
    assert choose_ids(counts, 2, [98, 99]).tolist() == [98, 99]
    for size in (0, -1, 1, V + 1):
        with pytest.raises(ValueError, match="impossible"):
            choose_ids(counts, size, [98, 99])


def test_coverage_is_what_recounting_gives():
    rng = np.random.default_rng(1)
    outputs = [output(i, (rng.zipf(1.5, 40) % V).tolist(), source="ab"[i % 2]) for i in range(10)]
    counts = count_ids(outputs, V)
    ids = choose_ids(counts, 12, [])
    found = coverage(ids, outputs, V)
    tokens = [t for o in outputs for t in o.output_ids]
    assert found["covered"] == pytest.approx(np.mean([t in set(ids.tolist()) for t in tokens]))
    assert found["tokens"] == len(tokens) == 400 and set(found["by_source"]) == {"a", "b"}
    by_size = coverage_by_size(counts, [], counts, sizes=(12, 50, 1000))
    assert by_size[12] == pytest.approx(found["covered"]) and by_size[V] == 1.0 and set(by_size) == {12, 50, V}
    assert compare_lists(ids, np.arange(V), counts)["covered"] == {
        "a": pytest.approx(found["covered"]),
        "b": 1.0,
        "both": pytest.approx(found["covered"]),
        "either": 1.0,
    }


def test_nothing_to_count_and_foreign_ids_are_refused():
    with pytest.raises(ValueError, match="no tokens"):
        count_ids([], V)
    with pytest.raises(ValueError, match="another model"):
        count_ids([output(0, [V])], V)


def test_a_million_tokens_are_counted_in_seconds(tmp_path):
    rng = np.random.default_rng(2)
    outputs = [output(i, rng.integers(0, 248_320, 1000).tolist()) for i in range(1000)]
    path = write(tmp_path / "big.jsonl", outputs, 248_320)
    began = time.perf_counter()
    counts, _ = count_files([path], 248_320)
    assert counts.sum() == 1_000_000 and time.perf_counter() - began < 30


@pytest.mark.parametrize("suffix", ["json", "pt"])
def test_verbs_write_the_same_bytes_every_time(tmp_path, capsys, suffix):
    rng = np.random.default_rng(3)
    outputs = [output(i, (rng.zipf(1.3, 200) % 8000).tolist(), source="chat") for i in range(30)]
    path = write(tmp_path / "o.jsonl", outputs, 8192)
    files = []
    for name in ("a", "b"):
        counts, ids = str(tmp_path / f"{name}.npy"), tmp_path / f"{name}.{suffix}"
        main(["count", str(path), "--counts", counts])
        main(["choose", counts, "--size", "1024", "--out", str(ids), "--held-out", str(path)])
        files.append(ids.read_bytes())
    assert files[0] == files[1]
    chosen = read_vocabulary(tmp_path / f"a.{suffix}", 8192)
    assert len(chosen) == 1024 and set(always_drafted(SHIPPED_CHECKPOINT)) <= set(chosen.tolist())
    capsys.readouterr()
    main(["compare", str(tmp_path / f"a.{suffix}"), str(tmp_path / f"b.{suffix}"), str(path)])
    assert json.loads(capsys.readouterr().out)["sizes"] == {"a": 1024, "b": 1024, "both": 1024}
    with pytest.raises(SystemExit, match="impossible"):
        main(["choose", str(tmp_path / "a.npy"), "--size", "3", "--out", str(tmp_path / "c.json")])


@needs_golden
def test_the_published_list_is_read(tmp_path):
    ids = read_vocabulary(DATA / "published_draft_vocab_ids.json", 248_320)
    assert len(ids) == 40_960
    found = coverage(ids, [output(0, ids[:3].tolist())], 248_320)
    assert found["covered"] == 1.0
