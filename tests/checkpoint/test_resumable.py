"""Runs that end early, in every way, and go on."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qwen38_jax.checkpoint import CheckpointError, resumable
from qwen38_jax.checkpoint.prepare import Options, plan_preparation
from tests.checkpoint.small import edit, make
from tests.checkpoint.test_prepare import contents

OPTIONS = Options(body="int8", embedding="keep", head="int4")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("source") / "m", dtype="bfloat16")


@pytest.fixture(scope="module")
def unbroken(source, tmp_path_factory):
    """Checksums of what a run makes that is not interrupted."""
    out = tmp_path_factory.mktemp("unbroken") / "m"
    plan_preparation(source, OPTIONS).run(out)
    return contents(out)


class Killed(BaseException):
    pass


def run_until(source, out, monkeypatch, name, when, error):
    """Starts a run in which the `when`th call of a function of `resumable` raises `error`."""
    real, calls = getattr(resumable, name), []

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) == when:
            raise error
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(resumable, name, fail)
        with pytest.raises((type(error), CheckpointError)) as raised:
            plan_preparation(source, OPTIONS).run(out)
    assert not out.exists()
    return raised.value


@pytest.mark.parametrize(
    "name, when",
    [
        ("write_json", 1),  # before anything is written
        ("write_safetensors", 1),
        ("write_safetensors", 4),
        ("_replace_json", 4),  # a shard is written and has no name yet
        ("write_json", 6),
        ("read_json", 3),  # a shard has its name
    ],
)
def test_a_run_goes_on_where_it_was(source, unbroken, tmp_path, monkeypatch, name, when):
    out = tmp_path / "m"
    run_until(source, out, monkeypatch, name, when, Killed())
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".m.unfinished" / "checkpoint").glob("*")}
    written = []
    real = resumable.write_safetensors
    with monkeypatch.context() as patch:
        patch.setattr(resumable, "write_safetensors", lambda path, tensors: written.append(real(path, tensors)))
        plan_preparation(source, OPTIONS).run(out)
    assert contents(out) == unbroken
    shards = [file for file in unbroken if file.endswith(".safetensors")]
    assert len(written) == len(shards) - len(done)
    assert all((out / file).stat().st_mtime_ns == time for file, time in done.items())
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("when", range(1, 4))
def test_the_last_steps_may_be_interrupted_too(source, unbroken, tmp_path, monkeypatch, when):
    """`os.replace` of the directory, and the removal of what is left, are the last of several."""
    out, plan = tmp_path / "m", plan_preparation(source, OPTIONS)
    shards = len(plan.shards)
    run_until(source, out, monkeypatch, "_write", shards, Killed())
    real, calls = os.replace, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == when:
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patch:  # the last shard: its record, its name, then the directory
        patch.setattr(resumable.os, "replace", fail)
        with pytest.raises(Killed):
            plan.run(out)
    assert not out.exists()
    plan_preparation(source, OPTIONS).run(out)
    assert contents(out) == unbroken


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name, when", [("write_safetensors", 3), ("write_json", 3)])
def test_a_disk_that_fills_up_leaves_no_file_under_a_final_name(
    source, unbroken, tmp_path, monkeypatch, code, name, when
):
    out = tmp_path / "m"
    error = run_until(source, out, monkeypatch, name, when, OSError(code, "full"))
    assert isinstance(error, CheckpointError) and f"the disk of {tmp_path} is full: make room" in str(error)
    assert os.listdir(tmp_path) == [".m.unfinished"] and not (tmp_path / ".m.unfinished" / "shard").exists()
    plan_preparation(source, OPTIONS).run(out)
    assert contents(out) == unbroken


def test_another_error_of_the_disk_is_not_called_full(source, tmp_path, monkeypatch):
    error = run_until(source, tmp_path / "m", monkeypatch, "write_safetensors", 2, OSError(errno.EIO, "broken"))
    assert isinstance(error, OSError) and not isinstance(error, CheckpointError)


def test_a_small_disk_is_refused_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(resumable.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 5_000, 5_000))
    with pytest.raises(CheckpointError, match=r"\d\d,\d{3} bytes are still to be written, .* has 5,000 free"):
        plan_preparation(source, OPTIONS).run(tmp_path / "m")
    assert list((tmp_path / ".m.unfinished").rglob("*.safetensors")) == []
    monkeypatch.undo()
    plan_preparation(source, Options()).run(tmp_path / "m")  # nothing was begun that other options could contradict


def test_only_what_is_left_needs_room(source, unbroken, tmp_path, monkeypatch):
    plan = plan_preparation(source, OPTIONS)
    run_until(source, tmp_path / "m", monkeypatch, "_write", len(plan.shards), Killed())
    left = plan.shards[-1].nbytes
    monkeypatch.setattr(resumable.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(left, 0, left))
    plan.run(tmp_path / "m")
    assert contents(tmp_path / "m") == unbroken


def test_an_unfinished_run_of_other_work_is_not_taken(source, tmp_path, monkeypatch):
    out = tmp_path / "m"
    run_until(source, out, monkeypatch, "write_safetensors", 3, Killed())
    with pytest.raises(CheckpointError, match=r"\.m\.unfinished holds an unfinished run that differs in options"):
        plan_preparation(source, Options()).run(out)
    other = make(tmp_path / "other", dtype="bfloat16")
    edit(other, lambda t: t["model.norm.weight"].__setitem__(0, 1))
    with pytest.raises(CheckpointError, match="differs in sources"):
        plan_preparation(other, OPTIONS).run(out)
    assert not out.exists()


def test_two_runs_at_once_are_refused(source, tmp_path):
    (tmp_path / ".m.unfinished").mkdir()
    with (tmp_path / ".m.unfinished" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="in use by another process"):
            plan_preparation(source, OPTIONS).run(tmp_path / "m")
    plan_preparation(source, OPTIONS).run(tmp_path / "m")


@pytest.mark.slow
def test_a_killed_process_resumes(source, unbroken, tmp_path):
    """SIGKILL while a shard is being written, then the command again."""
    killer = """
import os, signal, sys
from qwen38_jax.checkpoint import resumable
from scripts.prepare_checkpoint import main
real, calls = resumable.write_safetensors, []
def write(path, tensors):
    calls.append(path)
    if len(calls) == 4:
        path.write_bytes(b"half a shard")
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, tensors)
resumable.write_safetensors = write
main(sys.argv[1:])
"""
    arguments = [str(source), str(tmp_path / "m"), "--body", "int8", "--embedding", "keep", "--head", "int4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    run = {"cwd": ROOT, "env": environment, "capture_output": True}
    killed = subprocess.run([sys.executable, "-c", killer, *arguments], **run)
    assert killed.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".m.unfinished"]
    assert len(list((tmp_path / ".m.unfinished" / "checkpoint").iterdir())) == 3
    again = subprocess.run([sys.executable, "scripts/prepare_checkpoint.py", *arguments], **run)
    assert again.returncode == 0, again.stderr
    assert contents(tmp_path / "m") == unbroken


def test_records_are_of_the_shards_that_were_taken_over(source, unbroken, tmp_path, monkeypatch):
    run_until(source, tmp_path / "m", monkeypatch, "_write", 5, Killed())
    records = list((tmp_path / ".m.unfinished" / "records").glob("*.json"))
    assert len(records) == 4
    plan_preparation(source, OPTIONS).run(tmp_path / "m")
    manifest = json.loads((tmp_path / "m" / "manifest.json").read_text())
    assert len(manifest["tensors"]) > 50
