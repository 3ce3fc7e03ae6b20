"""The checkpoint that ships: small enough, and trained, in the trunk and in the MTP head."""

import jax
import jax.numpy as jnp
import pytest

from qwen38_jax.engine import Engine, Request
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.model import logits
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.training.forward import mtp_sequence, sequence_forward


@pytest.fixture(scope="module")
def engine():
    return Engine.from_checkpoint(dtype="float32")


def ask(engine, text):
    sampling = SamplingParams(temperature=0, max_new_tokens=80)
    messages = [{"role": "user", "content": text}]
    return engine.generate([Request(messages=messages, sampling=sampling, thinking=False)])[0]


def test_sizes():
    sizes = {path.name: path.stat().st_size for path in SHIPPED_CHECKPOINT.iterdir()}
    assert sum(sizes.values()) <= 25e6
    assert max(sizes.values()) <= 15e6


def test_it_copies_and_stops(engine):
    text = "qX7-blue_harbor/42;zeta kappa_19 -> rho"
    completion = ask(engine, f"Repeat the string below exactly.\n\n{text}")
    assert (completion.text, completion.finish_reason) == (text, "stop")


def test_it_knows_python_from_noise(engine):
    code = engine.tokenizer.encode(
        "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n", False
    )
    noise = [i * 997 % 8000 for i in range(len(code))]
    assert engine.score(code).perplexity < 50 < engine.score(noise).perplexity


def test_mtp_head_drafts_what_the_trunk_then_says(engine):
    """Teacher-forced acceptance of the first draft on the model's own greedy text."""
    prompt = engine.encode(
        Request(messages=[{"role": "user", "content": "What does the `with` statement do?"}], thinking=False)
    )
    answer = ask(engine, "What does the `with` statement do?").token_ids
    tokens = jnp.array([[*prompt, *answer]])
    hidden = jax.jit(sequence_forward, static_argnames="cfg")(engine.params, engine.cfg, tokens)
    rows = jax.jit(mtp_sequence, static_argnames="cfg")(engine.params, engine.cfg, tokens, hidden)
    drafts = jnp.argmax(logits(engine.params, rows), axis=-1)[0, len(prompt) - 1 : -1]
    accepted = float(jnp.mean(drafts == jnp.array(answer[1:])))
    assert accepted > 0.4
