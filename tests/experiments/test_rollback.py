"""The ways of taking drafts back agree with each other, and with the bytes they are said to need."""

import dataclasses

import jax
import pytest

from experiments import rollback
from experiments.rollback import WAYS, Sizes
from qwen38_jax.params import tree_bytes

SMALL = Sizes(layers=2, batch=2, rows=3, key_heads=1, value_heads=2, key_dim=8, value_dim=4)


def test_all_ways_give_the_same_outputs(monkeypatch):
    assert rollback.check(SMALL) < 1e-5
    wrong = WAYS["deferred"].step

    def late(memory, inputs, before, after):
        return wrong(memory, inputs, before - 1, after)

    monkeypatch.setitem(WAYS, "deferred", dataclasses.replace(WAYS["deferred"], step=late))
    with pytest.raises(ValueError, match="differ"):
        rollback.check(SMALL)


def test_bytes():
    """A slot of 2 layers, 2 heads of 8 x 4; a row writes a key of 8, two deltas of 4 and two decays."""
    state, row = 4 * 2 * 2 * 8 * 4, 4 * 2 * (8 + 2 * 4 + 2)
    needed = {name: tree_bytes(jax.eval_shape(lambda way=way: way.start(SMALL))) // 2 for name, way in WAYS.items()}
    assert needed == {"slots": 3 * state, "masked": state + 3 * row, "deferred": state + 3 * row}
    moved = {name: way.moved(SMALL) for name, way in WAYS.items()}
    assert moved == {"slots": 4 * state, "masked": 3 * state + 6 * row, "deferred": 2 * state + 6 * row}


def test_record():
    record = rollback.record("deferred", SMALL, 0.0, {"like": "tiny"}, steps=1, repeats=2)
    assert record["settings"]["rows"] == 3 and record["repeats"] == 2 and record["results"]["gb_per_second"] > 0
