"""The card that ships says what the committed record says, of the weights that ship.

That these weights load here and in `transformers`, with equal logits, is in `test_parity.py`.
"""

import json

from experiments.harness import read_records
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from scripts.make_card import RECORDS, make_card
from scripts.measure_tiny import TRAINING_RUN, weights_hash


def test_record_is_of_the_weights_that_ship():
    assert read_records(RECORDS)[-1]["settings"]["weights_sha256"] == weights_hash(SHIPPED_CHECKPOINT)


def test_card_is_the_one_made_from_the_record():
    card = (SHIPPED_CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert card == make_card(SHIPPED_CHECKPOINT, TRAINING_RUN, RECORDS), "run python -m scripts.make_card"


def test_card_says_what_the_run_learned_from(tmp_path):
    plan = {"stages": [{"length": 2048, "rows": 32, "steps": 100}], "peak_rate": 0.003, "optimizer": "muon"}
    plan |= {"commit": "0123456789abcdef", "device": "NVIDIA H200", "devices": 4}
    data = {
        "python": "3.12.1",
        "mixture": {"plain/code": 0.13, "rename": 0.18},
        "corpus": {"train/code": {"documents": 1365, "characters": 26505518}},
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "held_out.json").write_text('{"loss_2048": 2.5}')
    (tmp_path / "log.jsonl").write_text('{"step": 20, "loss": 8.5}\n{"step": 40, "loss": 7.25}\n')
    card = make_card(SHIPPED_CHECKPOINT, tmp_path, RECORDS)
    lines = card.split("\n")
    for row in ("| 2,048  | 32   | 100   |", "| train/code | 1,365     | 26,505,518 |", "| 40   | 7.250 |"):
        assert row in lines
    for text in (
        "7 M tokens",
        "at commit 0123456789, on 4 NVIDIA H200.",
        "peak_rate 0.003",
        "optimizer muon",
        "| rename       | 18 %",
        "loss_2048 2.500",
    ):
        assert text in card
