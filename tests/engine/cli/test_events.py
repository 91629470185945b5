"""Events are read by the rules of their format, however the stream is cut."""

from __future__ import annotations

import pytest
from depth import at_depth

from kiln.engine.cli.events import EventReader

STREAM = (
    "\ufeffdata: one\n\n"
    ": a comment\r\n\r\n"
    "data:two\r\ndata: \u2028lines\u0085\u2029 😀\r\n\r\n"
    "event: x\rid: 5\rdata: three\r\r"
    "\n\ndata\n\n"
    "data: four: 4\n\ndata: not complete\n"
).encode()
EVENTS = ["one", "two\n\u2028lines\u0085\u2029 😀", "three", "", "four: 4"]


@pytest.mark.parametrize("step", at_depth([1, 3, 7, len(STREAM)], list(range(1, len(STREAM) + 1))))
def test_events_do_not_depend_on_how_the_stream_was_cut(step):
    reader = EventReader()
    pieces = [STREAM[at : at + step] for at in range(0, len(STREAM), step)]
    assert [event for piece in pieces for event in reader.push(piece)] == EVENTS
