"""The card that ships says what the committed record says, of the weights that ship.

That these weights load here and in `transformers`, with equal logits, is in `test_parity.py`.
"""

from experiments.harness import read_records
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from scripts.make_card import RECORDS, make_card
from scripts.measure_tiny import TRAINING_RUN, weights_hash


def test_record_is_of_the_weights_that_ship():
    assert read_records(RECORDS)[-1]["settings"]["weights_sha256"] == weights_hash(SHIPPED_CHECKPOINT)


def test_card_is_the_one_made_from_the_record():
    card = (SHIPPED_CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert card == make_card(SHIPPED_CHECKPOINT, TRAINING_RUN, RECORDS), "run python -m scripts.make_card"
