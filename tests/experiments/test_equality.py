"""Where two answers part, and whether that is a near-tie."""

from experiments.equality import RUNGS, compare, requests
from qwen38_jax.drafters.modes import plan
from qwen38_jax.engine import Completion
from qwen38_jax.engine.request import TokenLogprob


def answer(*tokens: tuple[int, float, int, float]) -> Completion:
    """Of tokens with their log-probability, an alternative and that one's."""
    logprobs = tuple(TokenLogprob(t, lp, ((t, lp), (other, lp2))) for t, lp, other, lp2 in tokens)
    return Completion(tuple(t for t, *_ in tokens), "", "length", 1, 1, 1.0, 1.0, 0.0, logprobs)


PLAIN = answer((5, -0.1, 6, -3.0), (7, -0.7, 8, -0.7005), (9, -0.2, 1, -2.0))


def test_equal_answers():
    assert compare(PLAIN, answer((5, -0.15, 6, -3.0), *[(7, -0.7, 8, -1.0), (9, -0.2, 1, -2.0)]), 1e-3) == (
        3, False, False, 0.15 - 0.1
    )  # fmt: skip


def test_a_near_tie_ends_the_comparison():
    found = compare(PLAIN, answer((5, -0.1, 6, -3.0), (8, -0.7, 7, -0.7), (2, -9.0, 3, -9.0)), 1e-3)
    assert (found.compared, found.near_tie, found.fault) == (1, True, False) and found.logprob_difference == 0


def test_other_differences_are_faults():
    first = compare(PLAIN, answer((6, -0.1, 5, -3.0), (7, -0.7, 8, -1.0), (9, -0.2, 1, -2.0)), 1e-3)
    unknown = compare(PLAIN, answer((5, -0.1, 6, -3.0), (3, -0.7, 8, -1.0), (9, -0.2, 1, -2.0)), 1e-3)
    shorter = compare(PLAIN, answer((5, -0.1, 6, -3.0), (7, -0.7, 8, -1.0)), 1e-3)
    assert [c.fault for c in (first, unknown, shorter)] == [True] * 3
    assert [c.compared for c in (first, unknown, shorter)] == [0, 1, 2]


def test_what_is_asked():
    asked = requests(50, 300)
    assert len(asked) == 50 and len({request.prompt or request.messages[0]["content"] for request in asked}) == 50
    assert {request.sampling.max_new_tokens for request in asked} == {300}
    for mode, draft_tokens, verify_tokens in RUNGS:
        assert plan(mode, draft_tokens, verify_tokens) is not None
