"""Teacher-forced acceptance counts what agrees with a given text, whatever the model would say."""

import numpy as np
import pytest

from qwen38_jax.evaluation.forced import forced_acceptance
from qwen38_jax.spec_config import SpecConfig
from tests.models import SMALL, prompt, small_params
from tests.speculation import DRAFTS, script

SPEC = SpecConfig(verify_tokens=DRAFTS)
TEXT = np.asarray(prompt(60, seed=3))[0].tolist()  # noise, which no model of these weights would say


def test_steps_and_places_are_those_of_the_text():
    for count, wrong, accepted in ((7, (), 7), (7, (4,), 4), (0, (), 0)):
        counts = forced_acceptance(small_params(), SMALL, script([TEXT], count, wrong), SPEC, TEXT[:20], TEXT[20:])
        assert counts.steps.tolist() == [-(-39 // (accepted + 1))]
        assert counts.steps[0] + counts.accepted.sum() == 39
        assert counts.accepted[0, 0, accepted:].sum() == 0 and counts.drafted[0, 0, :count].all()


@pytest.mark.parametrize(
    ("before", "after", "words"), [([], [1, 2], "prompt"), ([1], [2], "at least 2"), ([1], [2, 64], "64")]
)
def test_bad_texts(before, after, words):
    with pytest.raises(ValueError, match=words):
        forced_acceptance(small_params(), SMALL, script([TEXT]), SPEC, before, after)
