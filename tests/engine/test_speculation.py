"""Speculation in the engine, on the checkpoint that ships: the text of plain decoding, where it ends, metrics."""

import dataclasses

import numpy as np
import pytest

from qwen38_jax.checkpoint import synthetic
from qwen38_jax.drafters.modes import make_drafter
from qwen38_jax.engine import Engine, Request
from qwen38_jax.sampling_params import SamplingParams

TEXT = "The ring road of Ystad has 41 bridges; bridge 17, the oldest, was rebuilt in 1987."
CHATS = (
    f"Repeat the text below exactly.\n\n{TEXT}",
    "What does the `with` statement do?",
    "Write a function that adds two numbers.",
    "Who are you?",
)


@pytest.fixture(scope="module")
def plain():
    return Engine.from_checkpoint(dtype="float32", max_batch=4)


@pytest.fixture(scope="module")
def speculative(plain):
    speculation = make_drafter("mtp+lookup", plain.params, draft_tokens=3, verify_tokens=7)
    return Engine(plain.params, plain.cfg, plain.tokenizer, speculation=speculation, max_batch=4)


def requests(**fields):
    sampling = SamplingParams(**{"temperature": 0, "seed": 0, "max_new_tokens": 64, **fields})
    return [Request(messages=[{"role": "user", "content": c}], sampling=sampling, thinking=False) for c in CHATS]


@pytest.mark.slow
def test_greedy_text_logprobs_and_metrics(plain, speculative):
    asked = requests(logprobs=2)
    want, got = plain.generate(asked), speculative.generate(asked)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert [(c.text, c.finish_reason) for c in got] == [(c.text, c.finish_reason) for c in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose([t.logprob for t in a.logprobs], [t.logprob for t in b.logprobs], atol=1e-3)
        assert [[i for i, _ in t.top] for t in a.logprobs] == [[i for i, _ in t.top] for t in b.logprobs]
        counts = a.speculation
        assert a.steps == counts.steps < b.steps and b.speculation is None
        assert counts.emitted == len(a.token_ids) - 1 == counts.steps + sum(counts.by_position.accepted)
        assert np.isclose(
            counts.tokens_per_step * counts.ms_per_step * counts.steps**2, counts.emitted * a.decode_seconds * 1000
        )
        assert all(x <= y for x, y in zip(counts.by_position.accepted, counts.by_position.drafted, strict=True))
        by_source = [d.drafted for d in counts.by_source.values()]
        assert tuple(map(sum, zip(*by_source, strict=True))) == counts.by_position.drafted
    assert set(got[0].speculation.by_source) == {"mtp", "lookup_head", "lookup_tail"}
    assert got[0].speculation.long_block_share > 0
    assert got[0].speculation.compiled_programs == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "like"), [("dflash2", "qwen3.8-27b-dflash2-w4a16"), ("dflash2+lookup", "qwen3.8-27b-dflash2")]
)
def test_dflash2_drafter_from_a_directory(plain, tmp_path, mode, like):
    """A random one, of which next to nothing is accepted; looked-up tokens are."""
    synthetic.write(tmp_path / "drafter", synthetic.recipe(like, scale="small", target=plain.cfg))
    engine = Engine.from_checkpoint(dtype="float32", speculate=mode, drafter=tmp_path / "drafter", max_batch=4)
    want, got = plain.generate(requests()), engine.generate(requests())
    assert [(c.token_ids, c.text, c.finish_reason) for c in got] == [
        (c.token_ids, c.text, c.finish_reason) for c in want
    ]
    sources = {"dflash2", "lookup_head", "lookup_tail"} if "lookup" in mode else {"dflash2"}
    assert set(got[0].speculation.by_source) == sources
    assert got[0].speculation.draft_tokens == 7 and got[0].speculation.verify_tokens == (15 if "lookup" in mode else 7)


@pytest.mark.slow
def test_stop_string_at_every_place(plain, speculative):
    """The repeated text comes in long blocks; a stop string may end anywhere inside of one."""
    [whole] = plain.generate(requests()[:1])
    assert TEXT in whole.text
    for first in range(0, len(TEXT) - 6, 4):
        stops = [TEXT[at : at + 6] for at in range(first, min(first + 4, len(TEXT) - 6))]
        asked = [requests(stop=(s,))[0] for s in stops]
        for stop, completion in zip(stops, speculative.generate(asked), strict=True):
            assert completion.text == whole.text[: whole.text.index(stop)], stop
            assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
            assert completion.finish_reason == "stop"


def test_sampled_text_does_not_depend_on_the_batch(speculative):
    asked = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.0, seed=i, top_k=20))
        for i, r in enumerate(requests(max_new_tokens=24))
    ]
    together = [c.token_ids for c in speculative.generate(asked)]
    assert [c.token_ids for c in speculative.generate(asked[::-1])][::-1] == together
    assert [c.token_ids for c in speculative.generate([asked[2], asked[0], asked[0]])] == [
        together[i] for i in (2, 0, 0)
    ]
