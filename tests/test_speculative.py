"""The decode step with drafts emits what plain decoding does, whatever the drafts are, and leaves the same state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen38_jax import decode, speculative
from qwen38_jax.drafters.mtp import Mtp
from qwen38_jax.spec_config import SpecConfig
from qwen38_jax.state import StateConfig, abstract_state, flush, init_state
from tests.models import SMALL, assert_same_up_to_rounding, nudged, prompt, small_params
from tests.speculation import (
    CAPACITY,
    DRAFTS,
    GREEDY,
    assert_same_mtp_cache,
    begin,
    generate,
    plain,
    sampler_of,
    script,
    step,
)

PROMPTS = [np.asarray(prompt(n, seed=n))[0].tolist() for n in (5, 21)]
SPEC = SpecConfig(verify_tokens=DRAFTS)
NEW = 33


def request(**fields):
    return dataclasses.replace(GREEDY, **{"max_new_tokens": NEW, **fields})


@functools.cache
def greedy():
    """What plain decoding says after PROMPTS, and the whole texts."""
    texts, _ = plain(small_params(), SMALL, PROMPTS, 204)
    return texts, [p + t for p, t in zip(PROMPTS, texts, strict=True)]


def run(drafter, requests=None, prompts=PROMPTS, **options):
    return generate(small_params(), SMALL, drafter, SPEC, prompts, requests or [request()] * len(prompts), **options)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 15, 31])
def test_any_number_of_drafts_right_and_wrong(k):
    texts, whole = greedy()
    for wrong in ((), range(k), *((i,) for i in range(1, k))):
        got, state = run(script(whole, k, wrong))
        assert got == [t[:NEW] for t in texts], wrong
        accepted = min(wrong, default=k)
        assert state.counts.steps.tolist() == [-(-(NEW - 1) // (accepted + 1))] * 2
        np.testing.assert_array_equal(state.counts.steps + state.counts.accepted.sum((1, 2)), NEW - 1)
        for row, ids in enumerate(whole):
            n = len(PROMPTS[row]) + NEW
            np.testing.assert_array_equal(state.history[row, :n], ids[:n])


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4, 15, 30, 31])
def test_state_after_some_of_the_drafts_equals_that_of_single_tokens(accepted):
    """Recurrent state, convolution, keys and values, and the MTP head's cache, with NaN in all that is free."""
    _, whole = greedy()
    _, state = run(script(whole, wrong=() if accepted == DRAFTS else (accepted,)), steps=1)
    _, single = plain(small_params(), SMALL, PROMPTS, accepted + 2)
    _, off = plain(nudged(small_params()), SMALL, PROMPTS, accepted + 2)
    assert_same_up_to_rounding(flush(state.decode.model), single.model, off.model)
    np.testing.assert_allclose(state.decode.hidden, single.hidden, atol=1e-4)
    assert_same_mtp_cache(state, [w[: len(p) + accepted + 1] for w, p in zip(whole, PROMPTS, strict=True)])


def test_stop_id_at_every_place_of_a_block():
    texts, whole = greedy()
    for place in range(9):
        stop = texts[0][place]
        got, state = run(script(whole), [request(stop_token_ids=(stop,)), request()])
        assert got[0] == texts[0][: texts[0].index(stop) + 1]
        assert got[1] == texts[1][:NEW]
        assert int(state.decode.generated[0]) == len(got[0])
    late, _ = run(script(whole), [request(stop_token_ids=(texts[0][0],), min_new_tokens=NEW), request()])
    assert len(late[0]) == NEW and texts[0][0] not in late[0]


def test_limit_at_every_place_of_a_block():
    texts, whole = greedy()
    for n in range(1, 9):
        got, _ = run(script(whole, 3), [request(max_new_tokens=n), request(max_new_tokens=9 - n)])
        assert got == [texts[0][:n], texts[1][: 9 - n]]


def test_the_state_may_be_filled_to_the_last_token():
    texts, whole = greedy()
    got, _ = run(script(whole), [request(max_new_tokens=10_000)] * 2)
    assert [len(p) + len(t) for p, t in zip(PROMPTS, got, strict=True)] == [CAPACITY, CAPACITY]
    assert [g[:204] for g in got] == [t[: len(g)] for t, g in zip(texts, got, strict=True)]


def test_penalties_see_the_drafted_prefix():
    requests = [request(repetition_penalty=1.3, frequency_penalty=0.7), request(presence_penalty=1.5)]
    texts, _ = plain(small_params(), SMALL, PROMPTS, NEW, requests)
    assert texts != [t[:NEW] for t in greedy()[0]]
    whole = [p + t for p, t in zip(PROMPTS, texts, strict=True)]
    got, state = run(script(whole, 7), requests)
    assert got == texts and state.counts.steps.tolist() == [4, 4]


def test_no_drafts_draw_what_plain_sampling_draws():
    requests = [request(temperature=1.0, seed=5, top_k=20), request(temperature=0.7, seed=6)]
    texts, _ = plain(small_params(), SMALL, PROMPTS, NEW, requests)
    assert run(script([[0]] * 2, 0), requests)[0] == texts


def test_greedy_and_sampled_requests_do_not_meet():
    """What is sampled depends on the drafts, but on no neighbour and no slot; a greedy text on nothing."""
    texts, whole = greedy()
    sampled = request(temperature=1.0, seed=5)
    one, _ = run(script(whole, 4), [request(), sampled])
    other, _ = run(script(whole[::-1], 4), [sampled, request()], PROMPTS[::-1])
    alone, _ = run(script(whole, 4), [request(temperature=0.3, seed=1), sampled])
    assert one[0] == texts[0][:NEW] == other[1]
    assert one[1] == other[0] == alone[1] != texts[1][:NEW]


def test_plain_steps_may_follow_accepted_drafts():
    """A step without drafts right after one that accepted some must read the state after those."""
    texts, whole = greedy()
    params, drafter = small_params(), script(whole, 4, (2,))
    state, output = begin(params, SMALL, drafter, SPEC, PROMPTS, [request()] * 2)
    got = np.asarray(output.tokens[:, 0]).tolist()
    got = [[t] for t in got]
    plain_step = jax.jit(decode.decode_step, static_argnames=("cfg", "top"))
    for length in (DRAFTS, None, DRAFTS, DRAFTS, None, None, DRAFTS):
        if length is None:
            decoded, output = plain_step(params, SMALL, state.decode, top=0)
            at = decoded.model.lengths[:, None]
            state = state.replace(
                decode=decoded, history=state.history.at[jnp.arange(2)[:, None], at].set(output.tokens)
            )
        else:
            state, output = step(params, SMALL, drafter, SPEC, state, verify_tokens=length, top=0)
        for row, text in enumerate(got):
            text += np.asarray(output.tokens[row, : int(output.emitted[row])]).tolist()
    assert len(got[0]) > 15 and got == [t[: len(g)] for t, g in zip(texts, got, strict=True)]


def test_200_wrong_blocks_without_the_host_and_without_compiling():
    texts, whole = greedy()
    params, drafter = jax.device_put(small_params()), script(whole, 3, (0,))
    state, output = begin(params, SMALL, drafter, SPEC, PROMPTS, [request(max_new_tokens=205)] * 2)
    outputs = [output.tokens]
    state, output = step(params, SMALL, drafter, SPEC, state, verify_tokens=DRAFTS, top=0)
    compiled = step._cache_size()
    outputs.append(output.tokens)
    with jax.transfer_guard("disallow"):
        for _ in range(200):
            state, output = step(params, SMALL, drafter, SPEC, state, verify_tokens=DRAFTS, top=0)
            outputs.append(output.tokens)
    assert step._cache_size() == compiled
    for row in range(2):
        assert [int(t[row, 0]) for t in outputs[1:]] == texts[row][1:202]
    assert state.counts.steps.tolist() == [201, 201] and not state.counts.accepted.any()


def test_mtp_and_lookup_equal_plain_decoding():
    """Two prompts of which one repeats itself, so that the lookup has something to find."""
    whole = greedy()[1]
    prompts = [whole[0][:40] + PROMPTS[0], PROMPTS[1]]
    expected, _ = plain(small_params(), SMALL, prompts, NEW)
    spec = SpecConfig(verify_tokens=7, lookup=True, nmin=2, cheap_context=50)  # long blocks first, then short ones
    got, state = generate(small_params(), SMALL, Mtp(None, 3), spec, prompts, [request()] * 2)
    assert got == expected
    assert_same_mtp_cache(state, [p + t[:-1] for p, t in zip(prompts, expected, strict=True)])
    own, found = state.counts.drafted[:, :2].sum(), state.counts.drafted[:, 2:].sum()
    assert own > 0 and found > 0
    assert 0 < state.counts.long_steps.sum() < state.counts.steps.sum()


def test_a_state_with_too_few_rows_is_refused():
    sizes = StateConfig(1, 64, rows=4)
    arguments = (init_state(SMALL, sizes), sampler_of(SMALL, [GREEDY], [[]]), jnp.ones(1, bool), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="blocks of 32 rows"):
        speculative.start(SMALL, Mtp(None, 1), SPEC, sizes, *arguments)


@pytest.mark.slow
def test_a_step_copies_no_cache():
    """What a step needs beside its arguments grows with the history, which the lookup reads, not with the caches."""
    spec = SpecConfig(verify_tokens=3, lookup=True)
    compiled = jax.jit(
        speculative.decode_step, static_argnames=("cfg", "spec", "verify_tokens", "top"), donate_argnames="state"
    )
    needed = []
    for capacity in (512, 8192):
        sizes = StateConfig(1, capacity, rows=4)
        sampler = sampler_of(SMALL, [GREEDY], [[]])
        start = functools.partial(speculative.start, SMALL, Mtp(None, 2), spec, sizes)
        one = jnp.ones(1, jnp.int32)
        state = jax.eval_shape(start, abstract_state(SMALL, sizes), sampler, one > 0, one)
        program = compiled.lower(small_params(), SMALL, Mtp(None, 2), spec, state, verify_tokens=3, top=0).compile()
        needed.append(program.memory_analysis().temp_size_in_bytes)
    pool = (8192 - 512) * SMALL.num_key_value_heads * SMALL.head_dim * 4  # keys of one layer
    assert needed[1] - needed[0] < pool, needed
