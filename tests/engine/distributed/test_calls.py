"""Calls from rank 0: the methods that a follower lists, with arguments of the declared types."""

from __future__ import annotations

import pytest

from kiln.engine.distributed.calls import Calls, encode_call


class Lamp:
    def __init__(self):
        self.heard = []

    def switch(self, name: str, level: int) -> None:
        self.heard.append((name, level))

    def dim(self, by: float) -> None:
        self.heard.append(by)

    def blink(self, times: list[int]) -> None:
        self.heard.append(times)

    def explode(self) -> None:
        raise AssertionError("not listed")


@pytest.fixture
def lamp():
    return Lamp()


@pytest.fixture
def calls(lamp):
    return Calls(lamp.switch, lamp.dim, lamp.blink)


def test_calls_run_in_order_with_their_arguments(lamp, calls):
    for content in (
        encode_call(Lamp.switch, "hall \u00e9", -(2**40)),
        encode_call(Lamp.dim, 0.1),
        encode_call(Lamp.dim, 2),
        encode_call(Lamp.blink, [3, 1]),
        encode_call(Lamp.blink, []),
    ):
        calls.run(content)
    assert lamp.heard == [("hall \u00e9", -(2**40)), 0.1, 2, [3, 1], []]


@pytest.mark.parametrize(
    ("method", "arguments", "says"),
    [
        (Lamp.explode, (), r"calls explode\(\), and this rank has only switch, dim, blink:"),
        (Lamp.switch, ("a",), r"calls switch\('a'\), .* switch\(name: str, level: int\)"),
        (Lamp.switch, ("a", 1, 2), r"switch\('a', 1, 2\)"),
        (Lamp.switch, ("a", "1"), r"switch\('a', '1'\)"),
        (Lamp.switch, ("a", 1.0), r"switch\('a', 1\.0\)"),
        (Lamp.switch, ("a", True), r"switch\('a', True\)"),
        (Lamp.switch, (None, 1), r"switch\(None, 1\)"),
        (Lamp.dim, ([1.0],), r"dim\(\[1\.0\]\), and this rank has dim\(by: float\)"),
        (
            Lamp.blink,
            ([1, "2"],),
            r"blink\(\[1, '2'\]\), and this rank has blink\(times: list\[int\]",
        ),
        (Lamp.blink, ([True],), r"blink\(\[True\]\)"),
        (Lamp.blink, (3,), r"blink\(3\)"),
        (Lamp.dim, ("x" * 500,), r"dim\('x{75}, and"),
    ],
)
def test_other_calls_are_refused_by_name(lamp, calls, method, arguments, says):
    with pytest.raises(ValueError, match=says):
        calls.run(encode_call(method, *arguments))
    assert lamp.heard == []


def test_a_rank_that_allows_no_call_says_so():
    with pytest.raises(ValueError, match="only none: do all ranks run the same version"):
        Calls().run(encode_call(Lamp.dim, 1.0))
