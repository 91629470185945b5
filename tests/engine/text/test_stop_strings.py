"""Stop strings: found wherever the pieces are cut, and no part of one gets out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from depth import at_depth
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.engine.text.stop_strings import StopMatcher


def expected(text, stops, include):
    """Look at one more character at a time, as somebody would who reads along."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def cut(text, places):
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)]


words = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=at_depth(300, 10_000), deadline=None)
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(words, max_size=4),
    places=st.lists(st.integers(0, 100), max_size=8),
    include=st.booleans(),
)
def test_the_result_does_not_depend_on_how_the_text_was_cut(text, stops, places, include):
    matcher, shown = StopMatcher(stops, include), ""
    want, by = expected(text, stops, include)
    for piece in cut(text, places):
        shown += matcher.feed(piece)
        assert want.startswith(shown), "part of a stop string got out"
        if matcher.stopped_by is not None:
            break
    assert shown + matcher.finish() == want
    assert matcher.stopped_by == by


def test_no_more_is_held_back_than_could_become_a_stop_string():
    matcher = StopMatcher(["<end>"])
    assert matcher.feed("text <e") == "text "
    assert matcher.feed("x") == "<ex"
    assert matcher.feed("<en<") == "<en"
    assert matcher.finish() == "<"


@pytest.mark.parametrize(
    ("pieces", "shown", "stopped_by"),
    [
        ([("a STOP", False), (" b", True)], "a STOP b", None),
        ([("a STO", False), ("P b", True)], "a ", "STOP"),
        ([("a STOP", False), (" STOP", True)], "a STOP ", "STOP"),
    ],
)
def test_a_stop_string_counts_only_if_it_ends_in_armed_text(pieces, shown, stopped_by):
    matcher = StopMatcher(["STOP"])
    assert "".join(matcher.feed(text, armed) for text, armed in pieces) == shown
    assert matcher.stopped_by == stopped_by


def test_a_short_stop_inside_held_text_that_was_not_armed_is_passed_over():
    matcher = StopMatcher(["ab", "xaby"])
    assert matcher.feed("xab", armed=False) == ""
    assert matcher.feed("z") == "xabz"
    assert matcher.stopped_by is None
