"""Calls of several streams are put in order, each by one wait."""

from __future__ import annotations

import pytest

from kiln.engine.distributed.stream_guard import StreamGuard


class FakeStreams:
    def __init__(self):
        self.now, self.captures, self.waits = "a", False, []

    def current(self):
        return self.now

    def is_capturing(self):
        return self.captures

    def wait_for(self, stream):
        self.waits.append((self.now, stream))


@pytest.fixture
def streams():
    return FakeStreams()


@pytest.fixture
def guard(streams):
    return StreamGuard(streams)


def calls(guard, streams, names):
    for streams.now in names:
        guard.enter()


def test_a_call_waits_for_the_stream_of_the_one_before(guard, streams):
    calls(guard, streams, "aabba")
    assert streams.waits == [("b", "a"), ("a", "b")]
    assert guard.waits == 2


def test_a_capture_has_an_order_of_its_own(guard, streams):
    calls(guard, streams, "a")
    streams.captures = True
    with guard.capture():
        calls(guard, streams, "cdd")
    with guard.capture():
        calls(guard, streams, "e")  # not behind d: that was another graph
    streams.captures = False
    assert streams.waits == [("d", "c")]
    calls(guard, streams, "a")  # what a capture recorded has not run
    assert streams.waits == [("d", "c")]


def test_a_replay_is_a_call(guard, streams):
    calls(guard, streams, "ab")
    assert streams.waits == [("b", "a")]


def test_a_device_without_streams_needs_no_order():
    guard = StreamGuard(None)
    guard.enter()
    assert guard.waits == 0
