"""DFlash2 inside the compiled decode step."""

import dataclasses

import numpy as np

from qwen38_jax.spec_config import SpecConfig
from tests.drafters.dflash2_golden import CFG, random_drafter
from tests.models import SMALL, prompt, small_params
from tests.speculation import GREEDY, begin, generate

DRAFTER = dataclasses.replace(
    CFG, vocab_size=SMALL.vocab_size, hidden_size=SMALL.hidden_size, mask_token_id=63, target_layer_ids=(1, 2)
)


def test_the_context_after_steps_is_that_of_the_text():
    """As if the whole text were a prompt; the drafter is random, so that most drafts are rejected."""
    drafter = random_drafter(DRAFTER)
    prompts, n = [prompt(k, seed=k)[0].tolist() for k in (3, 20)], 30  # the window is passed
    spec = SpecConfig(verify_tokens=drafter.draft_tokens)
    requests = [dataclasses.replace(GREEDY, max_new_tokens=n)] * 2
    texts, state = generate(small_params(), SMALL, drafter, spec, prompts, requests)
    assert [len(text) for text in texts] == [n, n]
    assert int(state.counts.drafted.sum()) > int(state.counts.accepted.sum())
    read = [ids + text[:-1] for ids, text in zip(prompts, texts, strict=True)]  # the last token is not
    whole, output = begin(small_params(), SMALL, drafter, spec, read, requests)
    assert output.tokens[:, 0].tolist() == [text[-1] for text in texts]
    np.testing.assert_array_equal(state.drafter.positions, whole.drafter.positions)
    for kept, expected in ((state.drafter.k, whole.drafter.k), (state.drafter.v, whole.drafter.v)):
        np.testing.assert_allclose(kept, expected, atol=1e-4)
