"""What a follower does when its connections to rank 0 close."""

from __future__ import annotations

import socket
import threading

import pytest

from kiln.engine.distributed import inbox as inboxes
from kiln.engine.distributed.channel import Channel, Kind, accept, listen
from kiln.engine.distributed.inbox import Inbox


@pytest.fixture
def exits(monkeypatch):
    """The codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(inboxes.os, "_exit", codes.append)
    return codes


@pytest.fixture
def connected(tmp_path, exits):
    """An inbox, and rank 0's ends of its connections, by role."""
    with listen(str(tmp_path / "ranks")) as listener:
        inbox = Inbox(str(tmp_path / "ranks"), 1)
        messages, life = accept(listener), accept(listener)
    yield inbox, messages, life
    messages.close()
    life.close()


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "kiln-life"]


def wait_for_watchers():
    for thread in watchers():
        thread.join(10)
    assert not watchers()


def test_a_follower_ends_when_rank_0_is_gone(connected, exits):
    _, messages, life = connected
    messages.close()
    life.close()
    wait_for_watchers()
    assert exits == [1]


def test_what_rank_0_said_before_it_closed_is_heard(monkeypatch, exits):
    """The next word of this rank may fail: rank 0 has already gone."""
    ours, theirs = map(Channel, socket.socketpair())
    theirs.send(Kind.STOP)
    theirs.close()
    inbox = Inbox.__new__(Inbox)
    inbox._life, inbox._check = ours, None
    inbox._live()
    assert exits == []
    ours.close()


def test_a_follower_that_is_told_to_stop_has_time_to_close(connected, exits):
    """Rank 0 may be faster, and its connections closed, while this rank still frees its memory."""
    inbox, messages, life = connected
    life.send(Kind.STOP)
    messages.send(Kind.STOP)
    life.close()
    messages.close()
    wait_for_watchers()
    assert exits == []
    assert inbox.next() == (Kind.STOP, b"")
