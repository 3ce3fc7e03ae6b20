"""The live comparison with PyTorch: `transformers` runs the same directory, layer by layer, fp32 on the CPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax.block import chain_block
from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.engine import Engine, Request
from qwen38_jax.engine.engine import SHIPPED_CHECKPOINT
from qwen38_jax.model import logits
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.state import StateConfig, init_state
from tests.golden import GOLDEN, needs_golden
from tests.models import run

torch = pytest.importorskip("torch", reason="the parity extra is not installed")
transformers = pytest.importorskip("transformers", reason="the parity extra is not installed")

MODELS = [
    pytest.param(GOLDEN / "tiny_qwen3_5", id="tiny", marks=needs_golden),
    pytest.param(GOLDEN / "realdims_qwen3_5", id="realdims", marks=needs_golden),
    pytest.param(SHIPPED_CHECKPOINT, id="shipped"),
]


def reference(directory):
    """The PyTorch model, and a dict that its next call fills with every layer's output."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    outputs = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _, __, out, i=i: outputs.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
    return model.eval(), outputs


@pytest.mark.parametrize("directory", MODELS)
def test_every_layer_and_the_logits(directory):
    model, outputs = reference(directory)
    checkpoint = load_checkpoint(directory, dtype="float32")
    params, cfg = checkpoint.params, checkpoint.cfg
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 90))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    state = init_state(cfg, StateConfig(2, 128))
    block = chain_block(jnp.asarray(ids), state.lengths)
    hidden, taps, _ = run(params, cfg, block, state, commit=True, tap_layers=tuple(range(cfg.num_hidden_layers)))
    scale = np.abs(expected).max()
    for i in range(cfg.num_hidden_layers):
        theirs = outputs[i].detach().numpy()
        np.testing.assert_allclose(taps[i], theirs, atol=1e-4 * max(1, np.abs(theirs).max()), err_msg=f"layer {i}")
    np.testing.assert_allclose(logits(params, hidden), expected, atol=1e-4 * max(1, scale))


def test_shipped_checkpoint_generates_the_same_greedy_tokens():
    """Token by token from a cache on both sides; a near-tie of the two best logits may go either way."""
    engine = Engine.from_checkpoint(dtype="float32")
    model, _ = reference(SHIPPED_CHECKPOINT)
    prompt = engine.encode(Request(messages=[{"role": "user", "content": "What does the with statement do?"}]))
    sampling = SamplingParams(temperature=0, max_new_tokens=48, ignore_eos=True)
    [completion] = engine.generate([Request(prompt_ids=prompt, sampling=sampling)])
    with torch.no_grad():
        scores = model(torch.tensor([prompt + list(completion.token_ids)])).logits[0].numpy()
    for i, token in enumerate(completion.token_ids):
        row = np.sort(scores[len(prompt) - 1 + i][: engine.tokenizer.vocab_size])
        best = int(np.argmax(scores[len(prompt) - 1 + i][: engine.tokenizer.vocab_size]))
        assert token == best or row[-1] - row[-2] < 1e-3, f"token {i}: {token}, the reference has {best}"


def test_shipped_tokenizer_and_template_agree():
    tokenizer = Engine.from_checkpoint().tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(SHIPPED_CHECKPOINT)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "naïve  `x = 1`\n日本 👩‍👧"},
        {"role": "assistant", "reasoning_content": "hm", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]
    for thinking in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=thinking)
        expected = expected["input_ids"] if not isinstance(expected, list) else expected
        assert tokenizer.encode_chat(messages, enable_thinking=thinking) == list(expected)
