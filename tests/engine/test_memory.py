import os

import pytest

from qwen38_jax.engine import memory
from qwen38_jax.engine.memory import cap_device_memory

GIB = 2**30


@pytest.fixture
def card(monkeypatch):
    """An NVIDIA GPU of 140 GiB, as far as nvidia-smi is asked."""
    monkeypatch.setattr(memory, "nvidia_smi", lambda query: [["143360"]])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)


def _fractions():
    return {name for name in os.environ if name.endswith("CLIENT_MEM_FRACTION")}


def test_a_budget_becomes_a_fraction_of_the_card(card):
    cap_device_memory(24)
    assert _fractions() == {"XLA_CLIENT_MEM_FRACTION"}
    pool = float(os.environ["XLA_CLIENT_MEM_FRACTION"]) * 140 * GIB
    assert pool == pytest.approx(24 * GIB - memory.RUNTIME_RESERVE, rel=1e-4)


def test_a_card_smaller_than_the_budget_is_left_alone(card, monkeypatch):
    cap_device_memory(200)
    monkeypatch.setattr(memory, "nvidia_smi", lambda query: [])
    cap_device_memory(24)
    assert _fractions() == {"XLA_PYTHON_CLIENT_MEM_FRACTION"}


@pytest.mark.parametrize("gib", [1, 0, -3, float("nan")])
def test_a_budget_that_the_runtime_takes_whole_is_an_error(card, gib):
    with pytest.raises(ValueError, match=f"a memory of {gib:g} GiB leaves nothing: the runtime takes 1 GiB of it"):
        cap_device_memory(gib)


def test_a_device_leaves_what_is_free_and_what_is_held(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 * GIB)
    assert memory.device_budget(held=GIB).nbytes == 6 * GIB
    assert "free memory" in memory.device_budget(memory_gib=8, held=GIB).source
    budget = memory.device_budget(memory_gib=4, held=GIB)
    assert (budget.nbytes, budget.source, budget.reserve) == (4 * GIB, "a memory of 4 GiB", 0)  # no context on a CPU
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert memory.device_budget() is None and memory.device_budget(memory_gib=4).nbytes == 4 * GIB
    assert memory.card_budget(24).nbytes == 23 * GIB and memory.card_budget(24).reserve == GIB


def test_without_nvidia_smi_nothing_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert memory.nvidia_smi("--query-gpu=memory.total") == []
