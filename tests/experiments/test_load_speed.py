import json

import numpy as np
import pytest

from experiments import load_speed
from experiments.load_speed import HostMemory, load_record, main, prepare_cache
from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.params import tree_bytes
from tests.checkpoint.small import make


@pytest.fixture
def directory(tmp_path):
    return make(tmp_path / "m")


def test_a_record_of_a_small_checkpoint(directory, monkeypatch):
    sizes = iter([100, 300, 200])
    monkeypatch.setattr(load_speed, "process_bytes", lambda: next(sizes) * 2**20)
    record = load_record(directory, "random", dtype=None, cache="warm", memory_gib=None, prompt=16, steps=2)
    params = tree_bytes(load_checkpoint(directory).params)
    results = record["results"]
    assert results["params_gib"] == params / 2**30
    assert results["read_gb"] == params / 1e9  # fp32 in the file and in memory
    assert results["gb_per_second"] == pytest.approx(results["read_gb"] / results["load_seconds"])
    assert results["process_gib"] == 300 / 1024
    assert results["planned_gib"] > results["params_gib"]
    assert record["weights"] == "random" and record["settings"]["checkpoint"] == "m"
    assert record["ms_per_step"] > 0 and results["prefill_seconds"] > 0


def test_growth_of_host_memory_is_seen():
    with HostMemory() as host:
        kept = np.ones(60 << 20, np.uint8)
        deadline = load_speed.time.perf_counter() + 5
        while not host.anonymous > 50 << 20 and load_speed.time.perf_counter() < deadline:
            load_speed.time.sleep(0.01)
    assert kept.nbytes < host.anonymous + (10 << 20) and host.anonymous < 100 << 20
    assert host.peak > 0


def test_the_file_cache_can_be_filled_and_emptied(directory):
    files = set(directory.glob("*.safetensors"))
    before = {path: path.read_bytes() for path in files}
    for state in load_speed.CACHE:
        prepare_cache(files, state)
    assert {path: path.read_bytes() for path in files} == before


def test_what_the_process_holds_of_a_gpu(monkeypatch):
    pid = str(load_speed.os.getpid())
    answers = {}
    monkeypatch.setattr(load_speed, "nvidia_smi", lambda query: answers.get(query.split("=")[0], []))
    assert load_speed.process_bytes() is None
    answers["--query-gpu"] = [["700"]]
    assert load_speed.process_bytes() == 700 * 2**20
    answers["--query-compute-apps"] = [["1", "5"], [pid, "600"]]
    assert load_speed.process_bytes() == 600 * 2**20
    answers["--query-compute-apps"] = [[pid, "[N/A]"]]
    assert load_speed.process_bytes() == 700 * 2**20


def test_faults_are_told(directory, capsys):
    with pytest.raises(SystemExit, match="config.json is missing"):
        main(["--checkpoint", str(directory.parent), "--weights", "random"])
    with pytest.raises(SystemExit, match="leaves 0.00 GiB"):
        main(["--checkpoint", str(directory), "--weights", "random", "--memory-gib", "1e-5"])
    with pytest.raises(SystemExit):
        main(["--checkpoint", str(directory), "--weights", "random", "--steps", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_results_are_json(directory, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load_speed, "run", lambda *args: (0.5, load_speed.Timing((0.01,))))
    monkeypatch.setattr(load_speed, "append", lambda record: (tmp_path / "record").write_text(json.dumps(record)))
    main(["--checkpoint", str(directory), "--weights", "random", "--file-cache", "cold"])
    record = json.loads((tmp_path / "record").read_text())
    assert record["settings"]["file_cache"] == "cold" and record["ms_per_step"] == 10
    assert "random weights" in capsys.readouterr().out
