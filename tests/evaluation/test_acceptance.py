"""Choices against a model run token by token, and what counts as repetition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen38_jax.engine import Engine, Request
from qwen38_jax.evaluation.acceptance import REPEATED, Text, choices, repeats
from qwen38_jax.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def engine():
    return Engine.from_checkpoint(dtype="float32", max_batch=2)


def test_the_trunk_agrees_with_its_own_greedy_answers_and_with_nothing_else(engine):
    sampling = SamplingParams(temperature=0, max_new_tokens=24)
    prompts = ["def f(x):\n", "import os\nimport sys\n\n\nclass Reader:\n"]
    requests = [Request(prompt=prompt, sampling=sampling) for prompt in prompts]
    texts = [
        Text(tuple(engine.encode(r)), c.token_ids) for r, c in zip(requests, engine.generate(requests), strict=True)
    ]
    [prompt, answer] = texts[0]
    changed = (*answer[:5], (answer[5] + 1) % 8000, *answer[6:])
    found = choices(
        engine.params, engine.cfg, [*texts, Text(prompt, changed)], real_vocab_size=engine.tokenizer.vocab_size, batch=2
    )
    assert all(c.trunk.all() for c in found[:2])
    assert found[2].trunk[:5].all() and not found[2].trunk[5]
    assert [len(c.head) for c in found] == [len(t.answer) - 1 for t in (*texts, texts[0])]
    assert (found[2].head[:4] == found[0].head[:4]).all() and 0.2 < np.concatenate([c.head for c in found[:2]]).mean()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_repeats(answer):
    found = repeats(answer)
    for i in range(len(answer)):
        stretch = answer[i + 1 - REPEATED : i + 1]
        before = [answer[j + 1 - REPEATED : j + 1] for j in range(REPEATED - 1, i)]
        assert found[i] == (i >= REPEATED - 1 and stretch in before)
