"""What a follower does when its connections to rank 0 close."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from kiln.engine.distributed import inbox as inboxes
from kiln.engine.distributed.channel import Channel, Closed, Kind, accept, listen
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
    inbox._life, inbox._check, inbox._stopped = ours, None, threading.Event()
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


def fault(told):
    raise RuntimeError("connection closed by peer")


@pytest.mark.parametrize("ends", [False, True])
def test_a_failure_that_follows_rank_0s_end_is_not_told(connected, exits, caplog, ends):
    """A sum that waits for rank 0 fails when rank 0 closes, as after a step that failed there."""
    inbox, messages, life = connected
    messages.send(Kind.START, b"{}")
    if ends:
        life.send(Kind.STOP)
    inbox.run(fault)
    assert exits == [0 if ends else 1]
    assert ("connection closed by peer" in caplog.text) != ends
    if ends:
        wait_for_watchers()
        inbox._life.close()
    said = []
    with suppress(Closed):
        while Kind.FAILED not in said:
            said.append(life.receive()[0])
    assert (Kind.FAILED in said) != ends
    life.close()
    wait_for_watchers()


KILLED = """
import sys
from kiln.engine.distributed.inbox import Inbox

inbox = Inbox(sys.argv[1], 1)

def fault(told):
    raise RuntimeError("connection closed by peer")

inbox.run(fault)
"""


def test_a_rank_whose_rank_0_was_killed_prints_no_traceback(tmp_path):
    address = str(tmp_path / "ranks")
    with listen(address) as listener:
        command = [sys.executable, "-c", KILLED, address]
        rank = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        messages, life = accept(listener), accept(listener)
    for channel in (messages, life):
        assert channel.receive()[0] is Kind.HELLO
    messages.send(Kind.START, b"{}")
    life.close()
    messages.close()
    assert rank.communicate(timeout=60)[1] == ""
    assert rank.returncode == 1
