"""The MTP head as a drafter: chains against vLLM's head, rows of accepted tokens, and the draft head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen38_jax.checkpoint import load_checkpoint
from qwen38_jax.drafters.interface import DraftContext, Observed, draft_log_q
from qwen38_jax.drafters.modes import cut_draft_head
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.sampling import sampler_state
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.state import StateConfig, init_state
from tests.golden import GOLDEN, needs_golden
from tests.models import SMALL, small_params

SIZES = StateConfig(1, 256, page=16)
GREEDY = SamplingParams(temperature=0, seed=0)
propose = jax.jit(Mtp.propose, static_argnames="cfg")
observe = jax.jit(Mtp.observe, static_argnames="cfg")


def observed(tokens, hidden, at, before, table) -> Observed:
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    positions = at + jnp.arange(tokens.shape[1])[None]
    taps = jnp.zeros((0, *tokens.shape, hidden.shape[-1]))
    valid = jnp.ones(tokens.shape, bool)
    return Observed(tokens, positions, valid, jnp.asarray(hidden)[None], taps, jnp.asarray(before)[None], table)


def context_of(cfg, anchor, position, hidden, request=GREEDY):
    sampler = sampler_state([request], [[]], vocab_size=cfg.vocab_size, real_vocab_size=cfg.vocab_size, eos_ids=())
    table = init_state(cfg, SIZES).block_table
    history = jnp.zeros((1, SIZES.capacity), jnp.int32)
    return DraftContext(
        jnp.array([anchor]),
        jnp.array([position]),
        jnp.asarray(hidden)[None],
        history,
        jnp.ones(1, bool),
        sampler,
        table,
    )


@needs_golden
@pytest.mark.parametrize("name", ["p0", "p1"])
def test_golden_chains(name):
    checkpoint = load_checkpoint(GOLDEN / "tiny_qwen3_5")
    params, cfg = checkpoint.params, checkpoint.cfg
    golden = load_file(GOLDEN / "tiny_qwen3_5_activations.safetensors")
    ids, hidden = golden[f"{name}.input_ids"], golden[f"{name}.final_norm"]
    anchor = int(golden[f"mtp.{name}.shifted_ids"][-1])
    drafter = Mtp(None, 4)
    table = init_state(cfg, SIZES).block_table
    state = drafter.init(cfg, SIZES)
    state = observe(drafter, params, cfg, observed(ids, hidden, 0, np.full_like(hidden[0], np.nan), table), state)
    context = context_of(cfg, anchor, len(ids), hidden[-1])
    proposal, state = propose(drafter, params, cfg, context, state)
    np.testing.assert_array_equal(proposal.tokens[0], golden[f"mtp.{name}.draft_tokens"])
    scores = np.sort(golden[f"mtp.{name}.draft_logits"], axis=-1)[:, ::-1][:, :64]
    picked = np.take_along_axis(golden[f"mtp.{name}.draft_logits"], np.asarray(proposal.candidates[0]), axis=-1)
    np.testing.assert_allclose(picked, scores, atol=1e-4)

    # The model reads the anchor and the next two; their rows replace the chain's.
    tokens = golden[f"{name}.greedy_tokens"]
    read = golden[f"{name}.decode_final_norm"][:3]
    state = observe(drafter, params, cfg, observed(tokens[:3], read, len(ids), hidden[-1], table), state)
    again = drafter.init(cfg, SIZES)
    whole = observed([*ids, *tokens[:3]], np.concatenate([hidden, read]), 0, np.full_like(hidden[0], np.nan), table)
    again = observe(drafter, params, cfg, whole, again)
    rows = len(ids) + 2
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        got, want = (np.asarray(t)[0].reshape(SIZES.capacity, -1)[:rows] for t in (got, want))
        np.testing.assert_allclose(got, want, atol=1e-4)


@functools.cache
def drafted(head_ids, request):
    """Proposal after an empty text, for SMALL."""
    head = None if head_ids is None else cut_draft_head(small_params(), head_ids, vocab_size=SMALL.vocab_size)
    hidden = jax.random.normal(jax.random.key(3), (SMALL.hidden_size,))
    drafter = Mtp(head, 3)
    context = context_of(SMALL, 5, 1, hidden, request)
    return propose(drafter, small_params(), SMALL, context, drafter.init(SMALL, SIZES))[0]


def test_only_the_draft_vocabulary_is_drafted():
    ids = tuple(range(1, 60, 3))
    for temperature in (0, 2.0):
        proposal = drafted(ids, SamplingParams(temperature=temperature, seed=1))
        assert set(proposal.tokens[0].tolist()) <= set(ids)
        assert set(proposal.candidates.reshape(-1).tolist()) == set(ids)
    greedy, whole = (drafted(i, SamplingParams(temperature=0, seed=1)) for i in (ids, None))
    assert not set(whole.tokens[0].tolist()) <= set(ids), "the list must exclude something"
    assert greedy.tokens[0, 0] in ids


def test_q_is_what_sampled_drafts_are_drawn_from():
    request = SamplingParams(temperature=1.3, seed=1)
    proposal = drafted(None, request)
    assert proposal.candidates.shape == (1, 3, 64) and not proposal.point_mass.any()
    np.testing.assert_allclose(jnp.exp(proposal.log_q).sum(axis=-1), 1, rtol=1e-5)
    own = proposal.candidates == proposal.tokens[..., None]
    assert (jnp.where(own, proposal.log_q, 0).sum(axis=-1) > -jnp.inf).all()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({}, 4), ({"top_k": 2}, 2), ({"top_p": 0.6}, 1), ({"top_p": 0.65}, 2), ({"top_k": 3, "top_p": 0.9}, 3)],
)
def test_q_heeds_temperature_and_filters(fields, kept):
    scores = jnp.log(jnp.array([[0.64, 0.2, 0.1, 0.06]]))
    request = SamplingParams(temperature=1.0, seed=0, **fields)
    sampler = sampler_state([request], [[]], vocab_size=8, real_vocab_size=8, eos_ids=())
    q = np.exp(draft_log_q(scores, sampler, truncate=True))[0]
    assert (q > 0).tolist() == [True] * kept + [False] * (4 - kept)
    np.testing.assert_allclose(q[:kept], np.exp(scores[0])[:kept] / np.exp(scores[0])[:kept].sum(), rtol=1e-5)
    np.testing.assert_allclose(np.exp(draft_log_q(scores, sampler, truncate=False))[0], np.exp(scores[0]), rtol=1e-5)
    hot = sampler.replace(temperature=jnp.array([2.0]))
    q = np.exp(draft_log_q(scores, hot, truncate=False))[0]
    np.testing.assert_allclose(q, np.sqrt(np.exp(scores[0])) / np.sqrt(np.exp(scores[0])).sum(), rtol=1e-5)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_broken_scores_still_yield_a_distribution(temperature):
    request = SamplingParams(temperature=temperature, seed=0, top_k=3)
    sampler = sampler_state([request], [[]], vocab_size=8, real_vocab_size=8, eos_ids=())
    nan, inf = jnp.nan, jnp.inf
    for scores in ([nan, 1.0, 2.0, -inf], [nan] * 4, [inf, inf, 1.0, nan], [-inf] * 4):
        q = jnp.exp(draft_log_q(jnp.array([scores]), sampler, truncate=True))
        np.testing.assert_allclose(q.sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 2], [2, 64]])
def test_bad_draft_vocabulary(ids):
    with pytest.raises(ValueError, match="draft vocabulary"):
        cut_draft_head(small_params(), ids, vocab_size=SMALL.vocab_size)
