"""How a group on GPUs ends, with a stand-in for NCCL, which waits for graphs with its calls."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kiln.engine.distributed import group as groups
from kiln.engine.distributed.group import Group


class Backend:
    """Both ways to end it wait until no graph is left, as NCCL's do."""

    def __init__(self, graphs):
        self._graphs = graphs
        self.events = []
        self.done = threading.Event()

    def shutdown(self):
        self._end("shutdown")

    def abort(self):
        self._end("abort")

    def _end(self, how):
        self.events.append(how)
        while self._graphs:
            time.sleep(0.005)
        self.done.set()


@pytest.fixture
def graphs():
    held = {"decode": "a graph with sums"}
    yield held
    held.clear()  # ends the threads


@pytest.fixture
def made(graphs):
    backend = Backend(graphs)
    return Group(0, 2, torch.device("cuda", 0), backend), backend


def test_graphs_are_freed_before_the_connections_close(made, graphs):
    group, backend = made
    group.before_close(graphs.clear)
    group.close()
    assert not graphs
    assert backend.events == ["shutdown"]
    assert backend.done.is_set()


def test_connections_that_do_not_close_are_left_and_told(made, monkeypatch, caplog):
    monkeypatch.setattr(groups, "_CLOSE_SECONDS", 0.1)
    group, backend = made
    begun = time.monotonic()
    group.close()
    assert time.monotonic() - begun < 3
    assert not backend.done.is_set()
    assert "the connections of rank 0 of 2 have not closed within 0.1 s" in caplog.text


def test_who_aborts_does_not_wait(made, graphs):
    """The thread that aborts also tells the clients that a rank is gone."""
    group, backend = made
    begun = time.monotonic()
    group.abort()
    assert time.monotonic() - begun < 3
    assert not group.meet(1.0)
    group.before_close(graphs.clear)
    group.close()
    assert backend.done.is_set(), "at the process' end its thread would find no driver"
    assert backend.events == ["abort"]
