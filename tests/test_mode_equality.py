"""Every mode says what plain decoding says, and modes may follow each other within a request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen38_jax import decode
from qwen38_jax.block_length import first_block
from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.drafters.dflash2 import DFlash2
from qwen38_jax.drafters.lookup import NoDrafter
from qwen38_jax.drafters.modes import make_drafter
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import StateConfig
from tests.drafters.dflash2_golden import CFG, random_drafter
from tests.golden import GOLDEN, needs_golden
from tests.models import SMALL, prompt, small_params
from tests.speculation import CAPACITY, DRAFTS, GREEDY, begin, generate, plain, step

NEW = 64


def drafter_of(cfg) -> DFlash2:
    return random_drafter(
        dataclasses.replace(
            CFG,
            vocab_size=cfg.vocab_size,
            hidden_size=cfg.hidden_size,
            num_target_layers=cfg.num_hidden_layers,
            target_layer_ids=(1, 2),
            mask_token_id=cfg.vocab_size - 1,
            max_position_embeddings=CAPACITY,
        )
    )


@functools.cache
def golden():
    """The reference's tiny checkpoint; four prompts, of which two hold some text twice; their plain texts."""
    checkpoint = load_checkpoint(GOLDEN / "tiny_qwen3_5")
    recorded = load_file(GOLDEN / "tiny_qwen3_5_activations.safetensors")
    prompts = [recorded[f"{name}.input_ids"][:64].tolist() for name in ("p0", "p1", "p2")]
    texts, _ = plain(checkpoint.params, checkpoint.cfg, prompts, NEW)
    for name, text in zip(("p1", "p2"), texts[1:], strict=True):
        assert text[:17] == recorded[f"{name}.greedy_tokens"].tolist()
    prompts[0] = prompts[0] + texts[0] + prompts[0][-40:]
    prompts.append(prompts[1] + texts[1] + prompts[1][-20:])
    return checkpoint, prompts, plain(checkpoint.params, checkpoint.cfg, prompts, NEW)[0]


@needs_golden
@pytest.mark.parametrize("mode", ["lookup", "mtp+lookup", "dflash2+lookup"])
def test_the_golden_checkpoint(mode):
    """Modes without a lookup take the same path; their texts are compared elsewhere, on other models."""
    checkpoint, prompts, texts = golden()
    dflash2 = drafter_of(checkpoint.cfg)
    dflash2 = (dflash2.params, dflash2.cfg) if "dflash2" in mode else None
    drafter, spec = make_drafter(mode, checkpoint.params, dflash2=dflash2)
    spec = dataclasses.replace(spec, nmin=1, nstrong=1, adaptive=False)
    requests = [dataclasses.replace(GREEDY, max_new_tokens=NEW)] * len(prompts)
    got, state = generate(checkpoint.params, checkpoint.cfg, drafter, spec, prompts, requests)
    assert got == texts
    own, found = state.counts.drafted[:, :2].sum(), state.counts.drafted[:, 2:].sum()
    assert (bool(own), bool(found)) == (mode != "lookup", "lookup" in mode)


SPEC = SpecConfig(verify_tokens=15, lookup=True, nmin=1, nstrong=2, nmin_tail=1)
_plain_step = jax.jit(decode.decode_step, static_argnames=("cfg", "top"))


def test_modes_follow_each_other():
    """A drafter that was not there for part of the text, whose caches are then unwritten or stale, changes nothing."""
    params = small_params()
    prompts = [np.asarray(prompt(n, seed=n))[0].tolist() for n in (5, 21)]
    texts, _ = plain(params, SMALL, prompts, 200)
    prompts[0] = prompts[0] + texts[0][:30] + prompts[0]  # so that the lookup finds something
    texts, _ = plain(params, SMALL, prompts, 200)
    drafters = {"lookup": NoDrafter(), "mtp": Mtp(None, 3), "dflash2": drafter_of(SMALL)}
    sizes = StateConfig(2, CAPACITY, rows=DRAFTS + 1, page=16)
    caches = {name: drafter.init(SMALL, sizes) for name, drafter in drafters.items()}
    caches = jax.tree.map(lambda t: jnp.full_like(t, jnp.nan) if t.dtype == jnp.float32 else t, caches)
    state, output = begin(params, SMALL, drafters["lookup"], SPEC, prompts)
    got, drafted = [[], []], {name: 0 for name in drafters}
    for mode in ("lookup", "mtp", "plain", "dflash2", "mtp", "plain", "plain", *("lookup", "dflash2", "mtp") * 8):
        for row, text in enumerate(got):
            text += np.asarray(output.tokens[row, : int(output.emitted[row])]).tolist()
        if mode == "plain":
            decoded, output = _plain_step(params, SMALL, state.decode, top=0)
            at = decoded.model.lengths[:, None]
            history = state.history.at[jnp.arange(2)[:, None], at].set(output.tokens)
            state = state.replace(decode=decoded, history=history)
            continue
        drafter, before = drafters[mode], state.counts.drafted.sum()
        length = drafter.draft_tokens or SPEC.verify_tokens
        state = state.replace(drafter=caches[mode], block=first_block(2, SPEC, drafter.draft_tokens))
        state, output = step(params, SMALL, drafter, SPEC, state, verify_tokens=length, top=0)
        caches[mode] = state.drafter
        drafted[mode] += int(state.counts.drafted.sum() - before)
    assert min(map(len, got)) > 20 and min(drafted.values()) > 0
    assert got == [t[: len(g)] for t, g in zip(texts, got, strict=True)]
