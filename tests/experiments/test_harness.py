import json
import math
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import harness
from experiments.harness import Timing, append, compile_cold, measure, measure_chain, new_record, read_records, table

SECONDS = Timing((0.004, 0.001, 0.002, 0.003, 0.005))


def record(**changes):
    return new_record(**{"question": "q", "weights": "trained", "settings": {"groups": 2}, **changes})


def test_timing_summary_is_in_milliseconds():
    assert SECONDS.median == 0.003
    expected = {"median_ms": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 5.0, "repeats": 5}
    assert SECONDS.summary() == pytest.approx(expected)


def test_measure_leaves_the_warmup_out(monkeypatch):
    """The clock moves by 10 s in every warm-up call and by 1, 2, 3 s in the ones that count."""
    durations = iter([10, 10, 1, 2, 3])
    clock = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])

    def function(argument):
        assert argument == "x"
        clock[0] += next(durations)

    assert measure(function, "x", warmup=2, repeats=3).seconds == (1, 2, 3)


def test_measure_waits_for_the_result(monkeypatch):
    waited = []
    monkeypatch.setattr(harness.jax, "block_until_ready", waited.append)
    measure(lambda: "result", warmup=1, repeats=2)
    assert waited == ["result"] * 3


def test_chain_donates_its_state_and_waits_once_a_repeat(monkeypatch):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    first = jnp.zeros(())
    waits = []
    wait = jax.block_until_ready
    monkeypatch.setattr(harness.jax, "block_until_ready", lambda x: waits.append(wait(x)))
    timing, state = measure_chain(step, first, steps=5, warmup=2, repeats=3)
    assert len(timing.seconds) == 3 and min(timing.seconds) > 0
    assert state == 25 and first.is_deleted()
    assert len(waits) == 5


def test_chain_gives_the_time_of_one_step(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])

    def step(state):
        clock[0] += 0.5
        return state

    assert measure_chain(step, 0, steps=8, repeats=1)[0].seconds == (0.5,)


@pytest.mark.parametrize("bad", ["steps", "warmup", "repeats"])
def test_a_chain_of_nothing_is_an_error(bad):
    with pytest.raises(ValueError, match="at least 1"):
        measure_chain(lambda x: x, 0, **{"steps": 1, bad: 0})


def test_cold_compilation_uses_no_cache_and_fills_none(tmp_path):
    traces = []

    def function(x):
        traces.append(x)
        return jnp.sin(x) @ x

    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    for name, value in zip(before, (str(tmp_path), 0, 0), strict=True):
        jax.config.update(name, value)
    harness.reset_cache()
    try:
        result = compile_cold(function, shape, repeats=3)
        assert len(traces) == 3 and not list(tmp_path.iterdir())
        jax.jit(lambda x: function(x) + 1).lower(shape).compile()
        assert list(tmp_path.iterdir()), "the cache is on again afterwards"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        harness.reset_cache()
    assert len(result.lower.seconds) == len(result.compile.seconds) == 3
    assert result.seconds == result.lower.median + result.compile.median
    x = np.eye(8, dtype=np.float32)
    np.testing.assert_allclose(result.program(x), np.sin(x), atol=1e-6)


def test_a_record_has_every_field_and_null_where_one_does_not_apply():
    fields = (
        "question command commit dirty time device platform driver power_limit_watts cpu cores python jax jaxlib "
        "weights predicted_for prompt_set output_tokens thinking repeats tokens_per_step ms_per_step "
        "ms_per_step_spread settings results"
    )
    made = record()
    assert list(made) == fields.split()
    absent = "predicted_for prompt_set output_tokens thinking repeats tokens_per_step ms_per_step ms_per_step_spread"
    assert all(made[name] is None for name in absent.split())
    assert made["jax"] == jax.__version__ and made["cores"] >= 1
    if made["platform"] == "cpu":
        assert made["driver"] is None and made["power_limit_watts"] is None
    assert made["command"].startswith("python ") and str(harness.ROOT) not in made["command"]


def test_a_record_keeps_a_timing_as_milliseconds():
    made = record(seconds_per_step=SECONDS, results={"prefill": SECONDS})
    assert made["ms_per_step"] == pytest.approx(3)
    assert made["ms_per_step_spread"] == pytest.approx({"min": 1, "q1": 2, "q3": 4, "max": 5})
    assert made["repeats"] == 5
    assert made["results"]["prefill"] == pytest.approx(SECONDS.summary())
    assert record(seconds_per_step=0.002)["ms_per_step"] == 2


def test_arrays_and_their_scalars_become_json():
    results = {"a": np.float32(0.5), "b": jnp.arange(2), "c": np.int64(3), "d": (True, None), "e": np.bool_(False)}
    assert record(results=results)["results"] == {"a": 0.5, "b": [0, 1], "c": 3, "d": [True, None], "e": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "good"}, "weights must be one of"),
        ({"question": "../q"}, "names a file"),
        ({"tokens_per_step": math.nan}, "q.tokens_per_step is nan"),
        ({"seconds_per_step": math.inf}, "q.ms_per_step is inf"),
        ({"results": {"rows": [1.0, {"x": np.float32("nan")}]}}, r"q.results.rows\[1\].x is nan"),
        ({"results": {"path": harness.ROOT}}, "q.results.path is a PosixPath"),
        ({"results": {"groups": 1}}, "named twice: groups"),
        ({"settings": {"device": "x"}}, "named twice: device"),
    ],
)
def test_bad_records_are_errors_that_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        record(**changes)


def test_whether_weights_are_trained_must_be_said():
    with pytest.raises(TypeError, match="weights"):
        new_record("q", settings={})


def test_the_commit_is_dirty_but_for_results(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert harness._commit() == (None, None)
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert harness._commit() == ("abc", None)
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    (tmp_path / "file").write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    commit, dirty = harness._commit()
    assert len(commit) == 40 and dirty is False
    (tmp_path / "experiments" / "results" / "q.jsonl").write_text("{}\n")
    assert harness._commit() == (commit, False)
    (tmp_path / "file").write_text("2")
    assert harness._commit() == (commit, True)


def test_the_driver_is_read_from_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    program.write_text('#!/bin/sh\n[ "$2" = 3 ] && echo "580.1, 250.00"\n')
    assert harness._driver() == ("580.1", 250.0)
    program.write_text('#!/bin/sh\necho "580.1, [N/A]"\n')
    assert harness._driver() == ("580.1", None)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert harness._driver() == (None, None)


def test_prompt_sets_are_told_apart():
    prompts = [["a"], [1, 2], [{"role": "user", "content": "é"}]]
    hashes = {harness.prompt_set_hash(prompt) for prompt in prompts}
    assert len(hashes) == 3 and {len(h) for h in hashes} == {12}
    assert record(prompts=["a"])["prompt_set"] == harness.prompt_set_hash(["a"])


def test_records_appended_at_once_stay_whole(tmp_path):
    def write(writer):
        for i in range(25):
            append({"question": "q", "writer": writer, "i": i, "filler": "x" * 5000}, tmp_path)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read_records(tmp_path / "q.jsonl")
    assert sorted((r["writer"], r["i"]) for r in records) == [(n, i) for n in range(4) for i in range(25)]


def test_nothing_is_appended_for_a_number_that_json_lacks(tmp_path):
    with pytest.raises(ValueError):
        append({"question": "q", "x": math.nan}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"q\.jsonl:2: not a record"):
        read_records(path)


def test_table_of_measured_numbers_of_trained_weights_needs_no_note():
    rows = [
        record(settings={"mode": "a|b", "thinks": True}, results={"fast": 12345.678, "kernel": SECONDS}),
        record(settings={"mode": "mtp", "thinks": False}, results={"fast": 1.23456}),
    ]
    assert table(rows, ["mode", "thinks", "fast=tok/s", "kernel.median_ms", "ms_per_step"]).splitlines() == [
        r"| mode | thinks | tok/s | kernel.median_ms | ms_per_step |",
        r"| ---- | ------ | ----- | ---------------- | ----------- |",
        r"| a\|b | yes    | 12346 | 3                | –           |",
        r"| mtp  | no     | 1.235 | –                | –           |",
    ]


def test_table_says_what_is_random_and_what_is_predicted():
    rows = [record(), record(weights="random"), record(weights="random", predicted_for="RTX 3090")]
    notes = [line.split("|")[-2].strip() for line in table(rows, ["groups"]).splitlines()]
    assert [notes[0], *notes[2:]] == ["note", "", "random weights", "random weights, predicted for RTX 3090"]


@pytest.mark.parametrize("rows", [[], [record()]])
def test_a_column_that_no_record_has_is_an_error(rows):
    with pytest.raises(ValueError, match="no record has speed"):
        table(rows, ["groups", "speed"] if rows else ["speed"])


def test_latest_keeps_the_last_of_equal_measurements():
    first, other, again = record(repeats=1), record(settings={"groups": 4}), record(repeats=2)
    assert harness.latest([first, other, again]) == [again, other]


def test_the_command_renders_a_file(tmp_path, capsys):
    for groups in (1, 2, 2):
        path = append(record(settings={"groups": groups}, tokens_per_step=1.0), tmp_path)
    harness.main(["table", str(path), "--columns", "groups", "tokens_per_step=t", "--where", "groups=2", "--latest"])
    assert capsys.readouterr().out.splitlines() == ["| groups | t   |", "| ------ | --- |", "| 2      | 1   |"]
    with pytest.raises(SystemExit, match="no record has speed"):
        harness.main(["table", str(path), "--columns", "speed"])


def test_the_command_line_of_a_record_is_the_one_that_was_run():
    code = "import json; from experiments.harness import new_record as r; "
    code += "print(json.dumps(r('q', weights='random', settings={})))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--flag", "a b"], cwd=harness.ROOT, capture_output=True, text=True
    )
    made = json.loads(done.stdout)
    assert made["command"].endswith("--flag 'a b'") and made["command"].startswith("python -c ")
