"""The measuring script from end to end, on the checkpoint that ships, with a few short trials."""

import pytest

from experiments.harness import append
from qwen38_jax.engine import Engine
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.evaluation.exam import Trials
from qwen38_jax.evaluation.figures import FIGURES
from qwen38_jax.training.corpus import load_corpus
from scripts.make_card import CardError, make_card
from scripts.measure_tiny import TRAINING_RUN, Subject, main, measure, weights_hash

pytestmark = pytest.mark.slow

FEW = Trials(
    reproduce_2k=0,
    reproduce_6k=0,
    rename=0,
    copy_256=0,
    functions=2,
    function_tokens=12,
    module_tokens=200,
    prose=1,
    prose_tokens=8,
    chats_per_task=1,
    chat_tokens=4,
    tasks_per_family=1,
    task_tokens=256,
    scored_documents=1,
    scored_tokens=64,
)


@pytest.fixture(scope="module")
def record():
    documents = load_corpus(max_code_bytes=1_000_000).train
    engine = Engine.from_checkpoint(dtype="float32", max_batch=4)
    subject = Subject(SHIPPED_CHECKPOINT, engine, documents[1::4], documents[::4], "this Python's")
    return measure(subject, FEW, batch=4, seed=0)


def test_record(record):
    settings, results = record["settings"], record["results"]
    assert settings["weights_sha256"] == weights_hash(SHIPPED_CHECKPOINT)
    assert settings["quick"] and settings["split"] == "this Python's"
    missing = {figure.path.partition(".")[0] for figure in FIGURES if figure.value(results) is None}
    assert missing == {"reproduce_2k", "reproduce_6k", "rename", "copy_256"}
    # These documents are training documents, which are no riddle to it.
    assert 1 < results["perplexity"]["code"]["perplexity"] < 60
    assert results["mtp_acceptance"]["chat"]["accepted"] > 0.4
    assert results["tasks"]["reproduce"]["accuracy"] > 0.9


def test_card_of_these_weights_only(record, tmp_path):
    path = append(record, tmp_path)
    card = make_card(SHIPPED_CHECKPOINT, TRAINING_RUN, path)
    assert "A quick run" in card and "not measured" in card
    append({**record, "settings": {**record["settings"], "weights_sha256": "0" * 64}}, tmp_path)
    with pytest.raises(CardError, match="of weights 000000000000"):
        make_card(SHIPPED_CHECKPOINT, TRAINING_RUN, path)
    with pytest.raises(CardError, match="log.jsonl is missing"):
        make_card(SHIPPED_CHECKPOINT, tmp_path, append(record, tmp_path))
    with pytest.raises(CardError, match="run scripts/measure_tiny.py first"):
        make_card(SHIPPED_CHECKPOINT, TRAINING_RUN, tmp_path / "none.jsonl")


def test_another_checkpoint_needs_its_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--checkpoint", str(tmp_path)])
    assert "--run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a checkpoint"):
        weights_hash(tmp_path)
