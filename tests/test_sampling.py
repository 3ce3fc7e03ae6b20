"""Sampling against a slow float64 reference, Hugging Face's processors, and counted frequencies."""

import dataclasses
import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from qwen38_jax import sampling
from qwen38_jax.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    process_logits,
    sample,
    sampler_state,
    token_logprobs,
    update_counts,
)
from qwen38_jax.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS, SamplingParams

V, REAL = 24, 21  # a vocabulary with a padded tail of three ids
EOS = (20, 19)
BATCH = 4  # nearly every test runs at this shape, so that the step compiles once
NEG_INF = float("-inf")


def params(**fields):
    return SamplingParams(**{"seed": 0, **fields})


def state_of(*requests, prompts=None, batch=BATCH, vocab_size=V, real_vocab_size=REAL, eos_ids=EOS):
    """The requests, then idle slots."""
    prompts = prompts or [[]] * len(requests)
    idle = batch - len(requests)
    return sampler_state(
        [*requests, *[params(temperature=0)] * idle],
        [*prompts, *[[]] * idle],
        vocab_size=vocab_size,
        real_vocab_size=real_vocab_size,
        eos_ids=eos_ids,
    )


def fill(rows, sampler):
    """Rows of the requests [n, ...], with zeros for the idle slots."""
    rows = np.asarray(rows)
    return np.concatenate([rows, np.zeros((len(sampler.temperature) - len(rows), *rows.shape[1:]), rows.dtype)])


@functools.cache
def compiled(candidates):
    """process_logits whose sort-free path reaches up to top_k = candidates."""

    def traced(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "CANDIDATES", candidates)
            return process_logits(*arguments)

    return jax.jit(traced)


def process(logits, sampler, generated=0, candidates=64):
    """Log-probabilities [n, V] for the requests' logits [n, V]; `generated` is one number or n."""
    generated = np.broadcast_to(np.asarray(generated, np.int32), len(logits))
    return np.asarray(compiled(candidates)(fill(logits, sampler), sampler, fill(generated, sampler)))[: len(logits)]


update = jax.jit(update_counts)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kept_ids(log_probs):
    return np.flatnonzero(log_probs > NEG_INF).tolist()


# --- The reference: one row, loops, float64 ---


def reference_logits(logits, p, prompt, output, generated):
    """Everything before temperature."""
    bias = dict(p.logit_bias)
    x = [float(value) if token < REAL else NEG_INF for token, value in enumerate(logits)]
    for token in range(V):
        x[token] += bias.get(token, 0.0)
        if generated < p.min_new_tokens and token in p.stop_ids(EOS):
            x[token] = NEG_INF
        if token in prompt or token in output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        if token in output:
            x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    return x


def reference_probs(x, p):
    """Probabilities, and how close a decision was to going the other way in lower precision."""
    if p.greedy:
        best = min(range(V), key=lambda token: (-x[token], token))
        return [float(token == best) for token in range(V)], 1.0
    temperature, top_p, min_p = (float(np.float32(v)) for v in (p.temperature, p.top_p, p.min_p))
    order = sorted(range(V), key=lambda token: (-x[token], token))
    weight = [math.exp((x[token] - x[order[0]]) / temperature) for token in range(V)]
    margin = 1.0
    if 0 < p.top_k < V:
        order = order[: p.top_k]
    if top_p < 1:
        total, before, head = sum(weight[token] for token in order), 0.0, []
        for token in order:
            if head:  # the first is kept whatever top_p
                margin = min(margin, abs(before / total - top_p))
            if before < top_p * total or not head:
                head.append(token)
            before += weight[token]
        order = head
    if 0 < min_p < 1:
        margin = min([margin, *(abs(weight[token] - min_p) for token in order)])
    order = [token for token in order if weight[token] >= min_p]
    total = sum(weight[token] for token in order)
    return [weight[token] / total if token in order else 0.0 for token in range(V)], margin


# Multiples of 1/4 with penalties that are powers of two: ties are frequent, and exact in fp32 and float64 alike.
quarters = st.integers(-12, 12).map(lambda n: n / 4)
tokens = st.integers(0, V - 1)
drawn_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 20, V, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.3, 0.62, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 2.0]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([-0.25, 0.0, 0.0, 1.0]),
    logit_bias=st.dictionaries(tokens, st.one_of(quarters, st.just(NEG_INF)), max_size=4),
    min_new_tokens=st.integers(0, 2),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
drawn_row = st.tuples(
    drawn_params,
    st.one_of(quarters.map(lambda q: [q] * V), st.lists(quarters, min_size=V, max_size=V)),
    st.lists(tokens, max_size=5),
    st.lists(tokens, max_size=3),
)


@pytest.mark.parametrize("candidates", [3, 64])
@settings(max_examples=50, deadline=None)
@given(rows=st.lists(drawn_row, min_size=BATCH, max_size=BATCH))
def test_agrees_with_the_reference(candidates, rows):
    requests, logits, prompts, outputs = zip(*rows, strict=True)
    expected = []
    for p, row, prompt, output in rows:
        probs, margin = reference_probs(reference_logits(row, p, prompt, output, len(output)), p)
        assume(margin > 1e-5)
        expected.append(probs)
    emitted = np.full((BATCH, 3), -1, np.int32)
    for row, output in enumerate(outputs):
        emitted[row, : len(output)] = output
    sampler = update(state_of(*requests, prompts=prompts), emitted, emitted >= 0)
    generated = [len(output) for output in outputs]
    actual = np.exp(process(np.asarray(logits, np.float32), sampler, generated, candidates))
    np.testing.assert_array_equal(actual > 0, np.asarray(expected) > 0)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_a_verify_block_equals_its_rows_one_at_a_time():
    requests = [
        params(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_new_tokens=3),
        params(temperature=0, frequency_penalty=1.5, logit_bias={3: 1.0}),
        params(top_k=5, top_p=0.8),
        params(frequency_penalty=-2),
    ]
    block = np.array([[5, 7, 7, 1], [4, 4, 9, 4], [0, 1, 2, 3], [8, 8, 8, 8]], np.int32)
    all_active = np.ones(BATCH, bool)
    sampler = state_of(*requests, prompts=[[1, 2], [3], [], [9]], real_vocab_size=V)  # -1 must not count for id V - 1
    sampler = update(sampler, block[:, 0], all_active)
    logits = 2 * normal(1, BATCH, 4, V)
    row, column = np.arange(4)[:, None], np.arange(4)
    drafted = np.where((column > 0) & (column <= row), block[:, None], -1)
    generated = np.broadcast_to(1 + np.arange(4), (BATCH, 4))
    in_block = jax.jit(process_logits)(logits, sampler, generated, drafted)
    for length in range(4):
        alone = process(logits[:, length], sampler, 1 + length)
        np.testing.assert_allclose(in_block[:, length], alone, rtol=1e-6)
        if length < 3:
            sampler = update(sampler, block[:, length + 1], all_active)


# --- Filters and ties ---


@pytest.mark.parametrize("candidates", [3, 64])
def test_ties_at_the_threshold_keep_the_lowest_ids(candidates):
    five_tied = np.array([2.0, 1, 3, 1, 1, 1, 1, 0] + [-9.0] * 16, np.float32)  # at rank 3
    level = np.zeros(V, np.float32)
    cases = [
        (five_tied, params(top_k=4), [0, 1, 2, 3]),
        (level, params(top_k=4), [0, 1, 2, 3]),
        (level, params(top_k=1), [0]),
        (level, params(top_p=1e-300), [0]),  # 0 in fp32
        (level, params(top_p=0.5, logit_bias={20: NEG_INF}), list(range(10))),
        (level, params(top_k=4, top_p=0.5), [0, 1]),
        (five_tied, params(min_p=1.0), [2]),
        (level, params(temperature=0), [0]),
    ]
    for four in (cases[:4], cases[4:]):
        logits, requests, expected = zip(*four, strict=True)
        log_probs = process(logits, state_of(*requests), candidates=candidates)
        assert [kept_ids(row) for row in log_probs] == list(expected)


def test_zeros_of_both_signs_are_tied():
    logits = np.where(np.arange(8) % 2, 0.0, -0.0).astype(np.float32)[None]
    for top_k, top_p in ((3, 1.0), (0, 0.3)):  # without and with the sort
        kept = sampling.filter_top_k_top_p(logits, jnp.full((1, 1), top_k), jnp.full((1, 1), top_p))
        assert kept_ids(kept[0]) == [0, 1, 2]


def test_a_small_top_k_does_not_notice_that_a_neighbour_sorts():
    logits = normal(2, BATCH, 300)
    small = [params(top_k=20, top_p=0.95), params(top_k=64, top_p=0.6)]
    wide = {"vocab_size": 300, "real_vocab_size": 300}
    without_sort = process(logits[:3], state_of(*small, params(), **wide))
    with_sort = process(logits[:3], state_of(*small, params(top_p=0.9), **wide))
    np.testing.assert_array_equal(without_sort[:2], with_sort[:2])
    assert kept_ids(without_sort[2]) == list(range(300))
    assert 1 < len(kept_ids(with_sort[0])) < 20 < len(kept_ids(with_sort[1])) < 64 < len(kept_ids(with_sort[2])) < 300


def test_top_p_1_keeps_the_whole_tail():
    logits = np.linspace(0, -60, 300, dtype=np.float32)[None]  # the tail is far under fp32's resolution of the sum
    log_probs = process(logits, state_of(params(top_k=299), vocab_size=300, real_vocab_size=300))
    assert kept_ids(log_probs[0]) == list(range(299))


def test_a_low_temperature_loses_no_digits():
    logits = np.full((1, V), NEG_INF, np.float32)
    logits[0, :3] = [20, 19.999, 19.9985]
    log_probs = process(logits, state_of(params(temperature=1e-3)))
    scaled = logits[0, :3].astype(np.float64) / np.float64(np.float32(1e-3))
    expected = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
    np.testing.assert_allclose(log_probs[0, :3], expected, rtol=1e-5)


def test_extreme_parameters_leave_a_distribution():
    requests = [
        params(temperature=1.1e-5, top_p=1e-300),
        params(temperature=1e6, repetition_penalty=1e6, logit_bias={0: 1e9, 1: -1e9, 2: NEG_INF}),
        params(temperature=1.1e-5, repetition_penalty=1e-6, logit_bias={0: 1e9, 1: 1e9}),
        params(temperature=1.1e-5, min_p=1.0, top_k=1),
    ]
    log_probs = process(20 * normal(0, BATCH, V), state_of(*requests, prompts=[[0, 1, 2, 3]] * 4))
    assert not np.isnan(log_probs).any()
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-5)


def test_broken_logits_lose():
    logits = np.zeros((2, V), np.float32)
    logits[:, [3, 4, 5, V - 1]] = [1, np.nan, np.inf, np.nan]
    log_probs = process(logits, state_of(params(temperature=0), params()))
    assert kept_ids(log_probs[0]) == [3]
    assert kept_ids(log_probs[1]) == [token for token in range(REAL) if token not in (4, 5)]


def test_the_padded_tail_is_never_sampled():
    vocab_size, real = 248320, 248077
    bias = {248257: 1e9, real: 1e9, vocab_size - 1: 1e9}
    requests = [params(top_k=20, top_p=0.95, logit_bias=bias), params(temperature=0, logit_bias=bias)]
    sampler = state_of(*requests, batch=2, vocab_size=vocab_size, real_vocab_size=real, eos_ids=(248046, 248044))
    logits = np.zeros((2, vocab_size), jnp.bfloat16)
    logits[:, real:], logits[:, real - 1] = 100, 1
    log_probs = process(logits, sampler)
    assert kept_ids(log_probs[0]) == [*range(18), real - 1]  # the best and, of 19 others, what makes up 0.95
    assert kept_ids(log_probs[1]) == [real - 1]
    _, top_ids, _ = token_logprobs(logits, np.zeros(2, np.int32), 5, real_vocab_size=real)
    assert top_ids.tolist() == [[real - 1, 0, 1, 2, 3]] * 2


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "temperature", "repetition_penalty", "all"])
def test_agrees_with_hugging_face(name):
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers.generation.logits_process")
    settings_of = {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05}
    warper = {
        "repetition_penalty": lambda: hf.RepetitionPenaltyLogitsProcessor(1.3),
        "temperature": lambda: hf.TemperatureLogitsWarper(0.7),
        "top_k": lambda: hf.TopKLogitsWarper(40),
        "top_p": lambda: hf.TopPLogitsWarper(0.8),
        "min_p": lambda: hf.MinPLogitsWarper(0.05),
    }
    names = list(settings_of) if name == "all" else [name]
    logits = 3 * normal(0, BATCH, 300)
    prompt, output = [3, 5, 8, 200], [5, 9, 9]
    scores = torch.tensor(logits)
    for each in names:
        scores = warper[each]()(torch.tensor([prompt + output] * BATCH), scores)
    sampler = state_of(
        *[params(**{each: settings_of[each] for each in names})] * BATCH,
        prompts=[prompt] * BATCH,
        vocab_size=300,
        real_vocab_size=300,
    )
    sampler = update(sampler, np.tile(output, (BATCH, 1)), np.ones((BATCH, 3), bool))
    actual = process(logits, sampler, 3)
    expected = torch.log_softmax(scores, -1).numpy()
    np.testing.assert_array_equal(actual > NEG_INF, expected > NEG_INF)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


# --- Stop ids ---


def test_stop_ids_wait_for_min_new_tokens():
    request = params(min_new_tokens=2, stop_token_ids=(7,))
    sampler = state_of(request, dataclasses.replace(request, ignore_eos=True), request)
    log_probs = process(np.zeros((3, V), np.float32), sampler, [1, 1, 2])
    assert set(range(REAL)) - set(kept_ids(log_probs[0])) == {7, 19, 20}
    assert set(range(REAL)) - set(kept_ids(log_probs[1])) == {7}
    assert kept_ids(log_probs[2]) == list(range(REAL))


# --- Draws ---


POSITIONS = np.arange(4096)


@jax.jit
def draw_on_device(sampler, logits, positions, purpose):
    shape = (len(logits), len(positions))
    log_probs = process_logits(logits, sampler, jnp.zeros(len(logits), jnp.int32))
    log_probs = jnp.broadcast_to(log_probs[:, None], (*shape, logits.shape[-1]))
    return sample(log_probs, sampler, jnp.broadcast_to(positions, shape), purpose)


def draw(sampler, logits, purpose=TARGET):
    """Tokens [n, 4096] at POSITIONS, each from its request's logits [n, V]."""
    return np.asarray(draw_on_device(sampler, fill(logits, sampler), POSITIONS, purpose))[: len(logits)]


def test_frequencies_match_the_distribution():
    logits = normal(3, 1, V)
    sampler = state_of(params(temperature=0.8, top_k=16, top_p=0.97, seed=11))
    probs = np.exp(process(logits, sampler)[0], dtype=np.float64)
    drawn = np.concatenate([draw(sampler, logits, purpose)[0] for purpose in (DRAFT, ACCEPT, RESIDUAL, TARGET)])
    counts = np.bincount(drawn, minlength=V)
    support = probs > 0
    assert 4 < support.sum() <= 16 and not counts[~support].any()
    expected = probs[support] / probs[support].sum() * counts.sum()
    assert stats.chisquare(counts[support], expected).pvalue > 0.01
    cooler = expected**1.1 / np.sum(expected**1.1) * counts.sum()
    assert stats.chisquare(counts[support], cooler).pvalue < 1e-4  # a wrong temperature would show


def test_purposes_and_positions_draw_independently():
    logits = np.where(np.arange(V) < 4, 0, NEG_INF).astype(np.float32)[None]
    sampler = state_of(params(seed=5))
    target, draft = draw(sampler, logits)[0], draw(sampler, logits, DRAFT)[0]
    for one, other in ((target, draft), (target[:-1], target[1:]), (target[1:], draft[:-1])):
        table = np.zeros((4, 4))
        np.add.at(table, (one, other), 1)
        assert stats.chi2_contingency(table).pvalue > 0.01


def test_filters_are_never_left():
    logits = normal(4, 2, V)
    sampler = state_of(params(top_k=2), params(top_p=0.5))
    log_probs, drawn = process(logits, sampler), draw(sampler, logits)
    assert set(drawn[0]) == set(np.argsort(-logits[0, :REAL])[:2])
    assert set(drawn[1]) == set(kept_ids(log_probs[1]))


def test_a_request_does_not_depend_on_its_neighbours():
    logits = normal(5, BATCH, V)
    request = params(seed=77, top_k=12, top_p=0.9)
    alone = draw(state_of(request, batch=1), logits[:1])[0]
    others = [params(temperature=0), params(seed=77, top_p=0.4), params(seed=3)]
    for slot in range(BATCH):
        requests = [*others[:slot], request, *others[slot:]]
        np.testing.assert_array_equal(draw(state_of(*requests), np.roll(logits, slot, axis=0))[slot], alone)
    other_seed = draw(state_of(dataclasses.replace(request, seed=78)), logits[:1])[0]
    assert (other_seed != alone).mean() > 0.3


def test_a_greedy_row_is_the_argmax_in_any_batch():
    logits = np.round(normal(6, BATCH, V))  # rounded: ties
    expected = np.argmax(logits[:, :REAL], axis=-1)
    greedy = params(temperature=0, top_k=5, top_p=0.3)
    mixed = draw(state_of(greedy, params(), params(temperature=1e-6), params()), logits)
    assert (draw(state_of(*[greedy] * BATCH), logits) == expected[:, None]).all()
    assert (mixed[[0, 2]] == expected[[0, 2], None]).all()
    assert len(set(mixed[1])) > 1 and len(set(mixed[3])) > 1


def test_seeds_use_all_64_bits():
    low, high = state_of(params(seed=9)), state_of(params(seed=9 + 2**40))
    np.testing.assert_array_equal(low.key_data[0], jax.random.key_data(jax.random.key(9, impl="threefry2x32")))
    logits = np.zeros((1, V), np.float32)
    assert (draw(low, logits) != draw(high, logits)).mean() > 0.5


def primitives(jaxpr, into_branches):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name != "cond" or into_branches:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from primitives(inner, into_branches)


def test_sorts_and_noise_only_run_where_they_are_needed():
    sampler, logits, zeros = state_of(params()), jnp.zeros((BATCH, V)), jnp.zeros(BATCH, jnp.int32)

    def step(logits, sampler):
        return sample(process_logits(logits, sampler, zeros), sampler, zeros)

    jaxpr = jax.make_jaxpr(step)(logits, sampler).jaxpr
    costly = {"sort", "top_k", "random_bits", "exp"}
    assert costly <= set(primitives(jaxpr, into_branches=True))
    assert not costly & set(primitives(jaxpr, into_branches=False))
    assert state_of(params(top_k=V)).top_k[0] == 0  # no filter, so no reason to sort


# --- State ---


def test_counts_of_inactive_rows_stay():
    sampler = update(state_of(*[params()] * 4), np.array([1, 1, 2, V - 1]), np.ones(4, bool))
    expected = np.array(sampler.output_counts)
    # A batch of three padded to four: the padding row's token is -1, the last row belongs to a live request.
    sampler = update(sampler, np.array([1, -1, 4, 5]), np.array([True, True, False, False]))
    expected[0, 1] += 1
    np.testing.assert_array_equal(sampler.output_counts, expected)


def test_counts_of_a_block_add_up():
    active = np.array([[True, True, True], [True, False, False]])
    sampler = update(state_of(params(), params(), batch=2), np.array([[3, 3, 4], [5, 6, 7]]), active)
    expected = np.zeros((2, V))
    expected[0, 3], expected[0, 4], expected[1, 5] = 2, 1, 1
    np.testing.assert_array_equal(sampler.output_counts, expected)


def test_a_new_request_enters_a_slot():
    old, new = params(top_k=3, logit_bias={1: 2.0}), params(temperature=0, stop_token_ids=(4,), seed=2**63)
    state = state_of(old, old, prompts=[[1], [2]])
    one = state_of(new, prompts=[[3, 3]])
    state = jax.tree.map(lambda rows, row: rows.at[1].set(row[0]), state, one)
    expected = state_of(old, new, prompts=[[1], [3, 3]])
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_sampler_state_refuses_what_jax_would_let_pass():
    for token in (V, 10**6):
        with pytest.raises(ValueError, match=f"logit_bias id.*got {token}"):
            state_of(params(logit_bias={token: 1.0}))
        with pytest.raises(ValueError, match=f"stop_token_ids id.*got {token}"):
            state_of(params(stop_token_ids=[token]))
    for token in (-1, V):
        with pytest.raises(ValueError, match=f"prompt id.*got {token}"):
            state_of(params(), prompts=[[0, token]])
        with pytest.raises(ValueError, match=f"eos_ids id.*got {token}"):
            state_of(params(), eos_ids=(token,))
    with pytest.raises(ValueError, match="seed is None"):
        state_of(SamplingParams())
    with pytest.raises(ValueError, match="a prompt a request"):
        state_of(params(), prompts=[[], []])
    all_but_eos = {token: NEG_INF for token in range(REAL) if token not in EOS}
    state_of(params(logit_bias=all_but_eos))
    with pytest.raises(ValueError, match="ban every id"):
        state_of(params(logit_bias=all_but_eos, min_new_tokens=1))


def test_process_logits_refuses_shapes_that_do_not_belong_together():
    with pytest.raises(ValueError, match="need generated"):
        process_logits(jnp.zeros((BATCH, V)), state_of(params()), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="sampler over"):
        process_logits(jnp.zeros((BATCH, V - 1)), state_of(params()), jnp.zeros(BATCH, jnp.int32))
    with pytest.raises(ValueError, match="drafted must be"):
        zeros = jnp.zeros(BATCH, jnp.int32)
        process_logits(jnp.zeros((BATCH, V)), state_of(params()), zeros, drafted=zeros[:, None])


def test_token_logprobs_are_the_models_own():
    logits = normal(1, 2, 3, V)
    logits[..., REAL:] = 50
    chosen = np.array([[0, 5, 20], [7, 7, 7]], np.int32)
    log_probs, top_ids, top = token_logprobs(jnp.asarray(logits), jnp.asarray(chosen), 4, real_vocab_size=REAL)
    exact = logits[..., :REAL].astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_probs, np.take_along_axis(exact, chosen[..., None], -1)[..., 0], rtol=1e-5)
    order = np.argsort(-exact, axis=-1)[..., :4]
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(exact, order, -1), rtol=1e-5)
    half, none, _ = token_logprobs(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(chosen), 0, real_vocab_size=REAL)
    assert half.dtype == jnp.float32 and none.shape == (2, 3, 0)
    with pytest.raises(ValueError, match="top must be"):
        token_logprobs(jnp.asarray(logits), jnp.asarray(chosen), REAL + 1, real_vocab_size=REAL)


# --- Parameters ---

NAN, INF = float("nan"), float("inf")
INVALID = {
    "temperature": [-0.1, NAN, INF, True, "1", None],
    "top_k": [-1, 2**31, 1.0, True, NAN, None],
    "top_p": [0, -0.1, 1.01, NAN, True, None],
    "min_p": [-0.01, 1.01, NAN, False],
    "repetition_penalty": [0, -1.0, NAN, INF, True],
    "presence_penalty": [-2.01, 2.01, NAN, True],
    "frequency_penalty": [-2.01, 2.01, NAN, INF, True],
    "logit_bias": [{-1: 1.0}, {0: INF}, {0: NAN}, {0: True}, {0: "1"}, {True: 1.0}, {"0": 1.0}, {0.5: 1.0}]
    + [3, [1, 2], [(1, 2, 3)], [(1, 0.5), (1, 0.25)], dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)],
    "min_new_tokens": [-1, 0.5, True, None, 2049],
    "max_new_tokens": [0, -1, 2.0, True, NAN, None],
    "stop_token_ids": [[-1], [True], [1.0], ["1"], 7, "7", range(MAX_STOP_IDS + 1)],
    "stop": ["word", [""], [b"x"], [None], 7],
    "seed": [-1, 2**64, 1.0, True],
    "logprobs": [-1, 21, 1.0, True],
    "ignore_eos": [1, None, "yes"],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in INVALID.items() for value in values])
def test_invalid_values_name_their_field(name, value):
    with pytest.raises(ValueError, match=f"^{name}.*(must|got)"):
        SamplingParams(**{name: value})


def test_messages_tell_the_range_and_the_value():
    with pytest.raises(ValueError, match=r"top_p must be a number in \(0.0, 1.0\], got 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"logprobs must be an integer in \[0, 20\], got 30"):
        SamplingParams(logprobs=30)


def test_valid_edges_are_normalised_and_hashable():
    edge = SamplingParams(
        temperature=np.float32(2),
        top_k=np.int64(1),
        top_p=1,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={9: NEG_INF, 2: 5},
        stop_token_ids=[8, 3, 8],
        stop=["a", "b"],
        seed=2**64 - 1,
        logprobs=0,
        max_new_tokens=1,
        min_new_tokens=1,
    )
    assert edge.logit_bias == ((2, 5.0), (9, NEG_INF)) and edge.stop_token_ids == (3, 8) and edge.stop == ("a", "b")
    assert type(edge.temperature) is float and type(edge.top_k) is int
    assert dataclasses.replace(edge, logit_bias=dict(edge.logit_bias)) == edge
    assert hash(edge) == hash(dataclasses.replace(edge))
    assert edge.stop_ids([4, 3]) == (3, 4, 8)
    assert dataclasses.replace(edge, ignore_eos=True).stop_ids([4, 3]) == (3, 8)


def test_validate_ids():
    request = SamplingParams(logit_bias={31: 1.0}, stop_token_ids=(30,))
    request.validate_ids(32)
    with pytest.raises(ValueError, match=r"logit_bias id must be an integer in \[0, 30\], got 31"):
        request.validate_ids(31)
    with pytest.raises(ValueError, match=r"stop_token_ids id must be .*got 30"):
        SamplingParams(stop_token_ids=(30,)).validate_ids(30)


def test_defaults_come_from_the_generation_config():
    config = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20, "eos_token_id": [248046, 248044]}
    assert SamplingParams.from_generation_config(config) == SamplingParams(top_p=0.95, top_k=20)
    overridden = SamplingParams.from_generation_config(config, top_p=0.5, top_k=None, seed=3)
    assert overridden == SamplingParams(top_p=0.5, top_k=20, seed=3)
    assert SamplingParams.from_generation_config(None) == SamplingParams()
    assert SamplingParams.from_generation_config({"temperature": None, "use_cache": True}) == SamplingParams()
    greedy = config | {"do_sample": False}
    assert SamplingParams.from_generation_config(greedy).greedy
    assert SamplingParams.from_generation_config(greedy, temperature=0.5).temperature == 0.5
    with pytest.raises(ValueError, match="^top_k"):
        SamplingParams.from_generation_config({"top_k": -5})
