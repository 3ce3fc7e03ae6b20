import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen38_jax.stopping import StopStrings


def run(stops, pieces):
    """What is shown of a text that arrives in `pieces`, and whether it was stopped."""
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def naive(stops, text):
    """The definition: grow the text until it ends with a stop string, cut the longest such."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


# Two letters make partial, repeated and overlapping matches common.
words = st.text("ab", min_size=1, max_size=5)


@given(st.lists(words, max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_equals_a_search_of_the_whole_text_for_any_chunking(stops, pieces):
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@given(st.lists(words, min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_holds_back_exactly_what_may_begin_a_stop_string(stops, pieces):
    matcher = StopStrings(stops)
    arrived = shown = ""
    for piece in pieces:
        arrived += piece
        text, stopped = matcher.push(piece)
        if stopped:
            break
        shown += text
        assert arrived.startswith(shown)
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((len(start) for start in beginnings if arrived.endswith(start)), default=0)
        assert len(arrived) - len(shown) == held


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        (("aab",), ["aaab"], "a", True),
        (("aab",), list("aaab"), "a", True),
        (("</s>",), ["hi <", "/", "s", "> more"], "hi ", True),
        (("</s>",), ["hi </", "sp>"], "hi </sp>", False),
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb", True),
        (("STOP",), ["STOP"], "", True),
        (("abcd", "bc"), ["abcd"], "a", True),  # The first to be complete.
        (("b", "ab"), ["xab"], "x", True),  # Both complete at once: the longer is cut.
        (("👩‍👧",), ["x👩", "\u200d", "👧"], "x", True),
        ((), ["anything"], "anything", False),
    ],
)
def test_cases(stops, pieces, shown, stopped):
    assert run(stops, pieces) == (shown, stopped)


def test_nothing_is_shown_after_a_stop():
    matcher = StopStrings(("x",))
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_flush_gives_what_was_held_once():
    matcher = StopStrings(("stop",))
    assert matcher.push("sto") == ("", False)
    assert matcher.flush() == "sto"
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [("",), ("a", ""), "abc", (None,)])
def test_refuses_stops_that_match_everywhere_or_are_no_strings(stops):
    with pytest.raises(ValueError, match="non-empty strings"):
        StopStrings(stops)
