"""Acceptance: exact in distribution for any kind of draft, the argmax for greedy requests, and unbreakable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen38_jax.drafters.interface import MTP, Proposal, draft_log_q, draw_candidate
from qwen38_jax.sampling import process_logits, sample, sampler_state, update_counts
from qwen38_jax.sampling_params import SamplingParams
from qwen38_jax.verification import verify
from tests.distribution import LENGTH, SAMPLES, V, assert_distributed, batch_of
from tests.golden import GOLDEN, needs_golden

K = 3
RNG = np.random.default_rng(0)
# The target and the drafter are Markov chains: logits of the next token given the last. They agree somewhat.
TARGET_LOGITS = jnp.asarray(RNG.normal(size=(V, V)) * 1.5, jnp.float32)
DRAFT_IDS = jnp.arange(0, V, 2)  # half of the vocabulary
DRAFT_LOGITS = 0.6 * TARGET_LOGITS[:, ::2] + jnp.asarray(RNG.normal(size=(V, V // 2)), jnp.float32)
FIRST = 7


def draft(last, at, point_mass, sampler) -> Proposal:
    """K drafts: looked up, a certain token, where `point_mass [K]` says so, else drawn from half of the vocabulary."""
    rows = []
    for i in range(K):
        log_q = draft_log_q(DRAFT_LOGITS[last], sampler, truncate=True)
        drawn = DRAFT_IDS[draw_candidate(log_q, sampler, at + i)]
        token = jnp.where(point_mass[i], (5 * last + 3) % V, drawn).astype(jnp.int32)
        rows.append((token, jnp.broadcast_to(DRAFT_IDS, log_q.shape), log_q))
        last = token
    tokens, ids, log_q = (jnp.stack(part, axis=1) for part in zip(*rows, strict=True))
    certain = jnp.broadcast_to(point_mass, tokens.shape)
    return Proposal(tokens, ids, log_q, certain, jnp.ones_like(certain), jnp.full_like(tokens, MTP))


@jax.jit
def speculate(sampler, point_mass):
    """The first LENGTH tokens `[B, LENGTH]` of every request, by blocks."""
    batch = len(sampler.temperature)
    text = jnp.zeros((batch, LENGTH + K + 1), jnp.int32)

    def block(_, carry):
        text, done, last, sampler = carry
        proposal = draft(last, done, point_mass, sampler)
        rows = jnp.concatenate([last[:, None], proposal.tokens], axis=1)
        drafted = jnp.where(jnp.arange(K + 1)[:, None] > jnp.arange(K), proposal.tokens[:, None], V)
        log_p = process_logits(TARGET_LOGITS[rows], sampler, done[:, None] + jnp.arange(K + 1), drafted)
        verdict = verify(log_p, proposal, sampler, done)
        emitted = jnp.arange(K + 1) <= verdict.accepted[:, None]
        at = jnp.where(emitted, done[:, None] + jnp.arange(K + 1), text.shape[1])
        text = text.at[jnp.arange(batch)[:, None], at].set(verdict.tokens, mode="drop")
        last = jnp.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)[:, 0]
        return text, done + verdict.accepted + 1, last, update_counts(sampler, verdict.tokens, emitted)

    start = (text, jnp.zeros(batch, jnp.int32), jnp.full(batch, FIRST), sampler)
    return jax.lax.fori_loop(0, LENGTH, block, start)[0][:, :LENGTH]


@functools.partial(jax.jit, static_argnums=1)
def exact(sampler, length):
    """`[V] * length`: the probability of every text by plain sampling; `sampler` has V ** (LENGTH - 1) requests."""
    joint = jnp.ones((1,))
    for n in range(length):
        texts = jnp.stack(jnp.unravel_index(jnp.arange(V**n), (V,) * n), axis=1) if n else jnp.zeros((1, 0), int)
        texts = jnp.resize(texts, (len(sampler.temperature), n)).astype(jnp.int32)
        last = texts[:, -1] if n else jnp.full(len(texts), FIRST)
        counted = update_counts(sampler, texts, jnp.ones(texts.shape, bool))
        log_p = process_logits(TARGET_LOGITS[last], counted, jnp.full(len(texts), n))[: V**n]
        joint = (joint[:, None] * jnp.exp(log_p)).reshape(-1)
    return joint


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}, {"frequency_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_blocks_are_distributed_as_plain_sampling(temperature, filters):
    request = SamplingParams(temperature=temperature, **filters)
    joint = exact(batch_of(request, V ** (LENGTH - 1)), LENGTH)
    for point_mass in ([False] * K, [True] * K, [True, False, True]):
        texts = speculate(batch_of(request, SAMPLES), jnp.array(point_mass))
        assert_distributed(texts, joint)


def test_the_test_tells_shared_noise_from_independent(monkeypatch):
    """Noise that the draft and the residual draw share is the classical fault; it must show."""
    from qwen38_jax.drafters import interface
    from qwen38_jax.sampling import RESIDUAL

    monkeypatch.setattr(interface, "DRAFT", RESIDUAL)
    request = SamplingParams(temperature=1.0)
    joint = exact(batch_of(request, V ** (LENGTH - 1)), LENGTH)
    texts = jax.jit(lambda s, p: speculate.__wrapped__(s, p))(batch_of(request, SAMPLES), jnp.zeros(K, bool))
    with pytest.raises(AssertionError):
        assert_distributed(texts, joint)


@needs_golden
def test_golden_greedy_acceptance():
    golden = load_file(GOLDEN / "golden_lookup.safetensors")
    scores = jnp.asarray(golden["reject/greedy/target_logits"]).reshape(4, 8, 128)
    tokens = jnp.asarray(golden["reject/greedy/draft_sampled"].reshape(4, 8)[:, 1:], jnp.int32)
    sampler = sampler_state(
        [SamplingParams(temperature=0, seed=0)] * 4, [[]] * 4, vocab_size=128, real_vocab_size=128, eos_ids=()
    )
    ones = jnp.ones(tokens.shape, bool)
    proposal = Proposal(tokens, tokens[..., None], jnp.zeros((4, 7, 1)), ones, ones, tokens)
    log_p = process_logits(scores, sampler, jnp.zeros((4, 8), jnp.int32))
    verdict = verify(log_p, proposal, sampler, jnp.zeros(4, jnp.int32))
    for row, n in enumerate(golden["reject/greedy/num_sampled"].tolist()):
        assert int(verdict.accepted[row]) + 1 == n
        assert verdict.tokens[row, :n].tolist() == golden["reject/greedy/sampled"][row, :n].tolist()


FAULTS = ("invalid", "id too large", "id negative", "nan", "inf", "more than 1", "never filled", "drawn from nothing")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_draft_leaves_plain_sampling(fault):
    """The token in its place is the one that plain sampling draws, whatever was accepted before."""
    request = SamplingParams(temperature=1.0)
    sampler = batch_of(request, 64)
    log_p = jnp.broadcast_to(jax.nn.log_softmax(TARGET_LOGITS[:3]), (64, 3, V))
    best = jnp.argmax(log_p[:, 0], axis=-1).astype(jnp.int32)
    tokens = jnp.stack([best, jnp.full(64, 3)], axis=1)
    ids = jnp.broadcast_to(jnp.arange(4), (64, 2, 4))
    log_q = jnp.full((64, 2, 4), jnp.log(0.25))
    certain = jnp.broadcast_to(jnp.array([True, False]), (64, 2))
    proposal = Proposal(tokens, ids, log_q, certain, jnp.ones_like(certain), tokens)
    changes = {
        "invalid": {"valid": proposal.valid.at[:, 1].set(False)},
        "id too large": {"tokens": tokens.at[:, 1].set(V), "point_mass": jnp.ones_like(certain)},
        "id negative": {"tokens": tokens.at[:, 1].set(-1), "point_mass": jnp.ones_like(certain)},
        "nan": {"log_q": log_q.at[:, 1, 0].set(jnp.nan)},
        "inf": {"log_q": log_q.at[:, 1, 0].set(jnp.inf)},
        "more than 1": {"log_q": log_q.at[:, 1].set(0.5)},
        "never filled": {"log_q": log_q.at[:, 1].set(-jnp.inf)},
        "drawn from nothing": {"tokens": tokens.at[:, 1].set(9)},
    }
    verdict = jax.jit(verify)(log_p, proposal.replace(**changes[fault]), sampler, jnp.full(64, 10))
    accepted = np.asarray(verdict.accepted)
    assert set(accepted.tolist()) == {0, 1}
    plain = np.asarray(sample(log_p[:, 1], sampler, jnp.full(64, 11)))
    np.testing.assert_array_equal(np.asarray(verdict.tokens)[accepted == 1, 1], plain[accepted == 1])
    assert np.ptp(plain) > 0


def test_same_distribution_always_accepts_and_no_mass_left_is_no_nan():
    request = SamplingParams(temperature=1.0)
    sampler = batch_of(request, 256)
    log_p = jnp.broadcast_to(jax.nn.log_softmax(TARGET_LOGITS[:2]), (256, 2, V))
    drawn = draw_candidate(log_p[:, 0], sampler, jnp.zeros(256, jnp.int32))[:, None]
    ids = jnp.broadcast_to(jnp.arange(V), (256, 1, V))
    no = jnp.zeros((256, 1), bool)
    same = Proposal(drawn, ids, log_p[:, :1], no, ~no, drawn)
    assert (verify(log_p, same, sampler, jnp.zeros(256, jnp.int32)).accepted == 1).all()
    # All of q, and more, lies where p is: whatever is rejected leaves nothing, and p itself is drawn from.
    claimed = same.replace(log_q=log_p[:, :1] + 5e-4)
    tokens = verify(log_p, claimed, sampler, jnp.zeros(256, jnp.int32)).tokens
    assert ((tokens >= 0) & (tokens < V)).all()


def test_greedy_and_sampled_requests_share_a_batch():
    """A greedy row takes the argmax though its neighbour samples, and heeds no q."""
    requests = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0, 1.0, 0))]
    sampler = sampler_state(requests, [[]] * 3, vocab_size=V, real_vocab_size=V, eos_ids=())
    scores = jnp.broadcast_to(TARGET_LOGITS[:2], (3, 2, V))
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    log_p = process_logits(scores, sampler, jnp.zeros((3, 2), jnp.int32))
    tokens = best[:, :1].at[2].add(1) % V
    ids, no = tokens[..., None], jnp.zeros((3, 1), bool)
    verdict = verify(
        log_p, Proposal(tokens, ids, jnp.zeros((3, 1, 1)), no, ~no, tokens), sampler, jnp.zeros(3, jnp.int32)
    )
    assert verdict.accepted[0] == 1 and verdict.accepted[2] == 0
    assert verdict.tokens[0].tolist() == best[0].tolist() and verdict.tokens[2, 0] == best[2, 0]


@needs_golden
def test_golden_greedy_loops():
    """The recorded blocks of whole generations, judged one after the other, give the recorded anchors and text."""
    golden = load_file(GOLDEN / "golden_e2e.safetensors")
    sampler = sampler_state(
        [SamplingParams(temperature=0, seed=0)], [[]], vocab_size=128, real_vocab_size=128, eos_ids=()
    )
    judge = jax.jit(verify)
    for i in range(5):
        text = golden[f"e2e/{i}/plain_greedy_ids"][0]
        blocks = golden[f"e2e/{i}/blocks_anchor_plus_drafts"].astype(np.int32)
        at = golden[f"e2e/{i}/prompt"].shape[-1]  # of the anchor
        for block in blocks:
            assert block[0] == text[at]
            said = np.resize(np.append(text[at + 1 :], np.zeros(8, int)), 8)  # what the target says row by row
            log_p = jnp.log(jax.nn.one_hot(said, 128))[None]
            tokens = jnp.asarray(block[None, 1:])
            sure = jnp.ones(tokens.shape, bool)
            proposal = Proposal(tokens, tokens[..., None], jnp.zeros((1, 7, 1)), sure, tokens >= 0, tokens)
            verdict = judge(log_p, proposal, sampler, jnp.array([at + 1]))
            accepted = int(verdict.accepted[0])
            n = min(accepted + 1, len(text) - 1 - at)  # the last block is cut
            np.testing.assert_array_equal(verdict.tokens[0, :n], text[at + 1 : at + 1 + n])
            at += n
        assert at == len(text) - 1, "the blocks end where the text does"
