"""Two nodes on one NFS folder, step by step: what one believes wrongly never becomes a failure."""

from __future__ import annotations

import os

import pytest
from cache_trials.nfs_client import NfsClient

from kiln.cache.disk.prune import prune
from kiln.cache.disk.store import Store
from kiln.cache.keys import content_key

ARCH, KEY, RIGHT = "sm_90a", content_key([("n", b"1")]), b"payload" * 500


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def nodes(tmp_path):
    """The clients of two nodes, their clock, and the store that both name."""
    clock = Clock()
    (tmp_path / "nfs").mkdir()
    first, second = (NfsClient(tmp_path / "nfs", remembers=30, now=clock) for _ in range(2))
    return first, second, clock, Store(tmp_path / "nfs" / "kernels")


def get(client, store):
    with client.mounted():
        entry = Store(store.root).get(ARCH, KEY)
    return None if entry is None else entry.payload


def put(client, store):
    with client.mounted():
        return Store(store.root).put(ARCH, KEY, RIGHT, {})


def test_a_node_that_believes_an_entry_absent_builds_and_publishes_all_the_same(nodes, caplog):
    first, second, clock, store = nodes
    assert get(first, store) is None
    assert put(second, store)
    assert get(first, store) is None, "the model: a name that was absent stays so for a while"
    assert first.stale_answers > 0
    assert put(first, store)
    assert get(first, store) == get(second, store) == RIGHT
    clock.now += 31
    assert get(first, store) == RIGHT
    assert not caplog.records


def test_an_entry_that_another_node_removed_is_a_miss(nodes, caplog):
    first, second, clock, store = nodes
    assert put(first, store)
    assert get(first, store) == RIGHT
    with second.mounted():
        assert len(prune(store.root, max_bytes=0, max_days=1).removed) == 1
    assert get(first, store) is None
    assert put(first, store)
    assert get(second, store) in (None, RIGHT)
    clock.now += 31
    assert get(second, store) == RIGHT
    assert not caplog.records


def test_an_entry_that_another_node_replaced_is_read_at_the_second_attempt(nodes, caplog):
    first, second, _, store = nodes
    assert put(first, store)
    assert get(first, store) == RIGHT
    with second.mounted():
        assert Store(store.root, mode="refresh").put(ARCH, KEY, RIGHT[::-1], {})
    before = first.stale_answers
    assert get(first, store) == RIGHT[::-1]
    assert first.stale_answers == before + 1, "the model: the old handle is stale"
    assert not caplog.records


def test_an_entry_removed_between_open_and_read_is_a_miss(nodes, monkeypatch, caplog):
    first, second, _, store = nodes
    assert put(first, store)
    with first.mounted():
        opened = os.open

        def open_then_lose(path, *args, **kwargs):
            fd = opened(path, *args, **kwargs)
            if str(path).endswith(".kk"):
                second._real["unlink"](path)  # the other node, at the worst moment
            return fd

        monkeypatch.setattr(os, "open", open_then_lose)
        assert Store(store.root).get(ARCH, KEY) is None
        monkeypatch.setattr(os, "open", opened)
    assert not caplog.records


def test_lost_replies_are_no_failures(tmp_path, caplog):
    (tmp_path / "nfs").mkdir()
    client = NfsClient(tmp_path / "nfs", lost=1.0)  # every reply
    store = Store(tmp_path / "nfs" / "kernels")
    assert put(client, store)
    assert client.stale_answers >= 6, "four folders, a link and an unlink"
    assert Store(store.root).get(ARCH, KEY).payload == RIGHT
    assert not list(store.root.rglob(".tmp-*"))
    assert not caplog.records


def test_a_client_that_never_learns_of_a_folder_serves_from_memory(tmp_path):
    (tmp_path / "nfs").mkdir()
    clock = Clock()
    first, second = (
        NfsClient(tmp_path / "nfs", remembers=30, drops_on_exist=False, now=clock) for _ in range(2)
    )
    store = Store(tmp_path / "nfs" / "kernels")
    assert get(first, store) is None
    assert put(second, store)
    assert put(first, store) in (True, False)  # never an exception
    clock.now += 31
    assert get(first, store) == RIGHT
