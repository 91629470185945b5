"""The adapters of the ranks that follow rank 0: what rank 0 does not keep, nobody keeps."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kiln.engine.errors import AdapterError
from kiln.engine.runner.followed_store import FollowedStore
from kiln.engine.runner.lead_store import LeadStore


class Store:
    """An AdapterStore of which one call may fail."""

    def __init__(self, fails=""):
        self.fails, self.kept = fails, []

    def read(self, name, path):
        if self.fails == "read":
            raise AdapterError("it is damaged")
        return SimpleNamespace(name=name)

    def add(self, packed):
        if self.fails == "add":
            raise AdapterError("above lora_host_memory_gib")
        self.kept.append(packed.name)
        return 1


class Ranks:
    """Followers, each of which gets the messages at once."""

    def __init__(self, *stores):
        self.failed = []
        self.stores = []
        for rank, store in enumerate(stores, 1):
            inbox = SimpleNamespace(reply=lambda error, rank=rank: self._replied(rank, error))
            self.stores.append(FollowedStore(store, inbox))

    def _replied(self, rank, error):
        if error is not None:
            self.failed.append((rank, error))

    def tell(self, kind, content):
        for store in self.stores:
            store.do(kind, json.dumps(content).encode())

    def replies(self):
        for store in self.stores:
            store._thread.submit(int).result()  # what was read before has ended
        failed, self.failed = self.failed, []
        return failed


@pytest.mark.parametrize("fails", [("read", "", ""), ("add", "", ""), ("", "read", ""), ("",) * 3])
def test_an_adapter_that_one_rank_refuses_is_forgotten_by_all(fails):
    own, *others = (Store(one) for one in fails)
    ranks = Ranks(*others)
    lead = LeadStore(own, ranks)
    for name in ("a", "b"):
        if any(fails):
            with pytest.raises(AdapterError):
                lead.add(lead.read(name, "folder"))
        else:
            lead.add(lead.read(name, "folder"))
    assert [store._read for store in ranks.stores] == [{}, {}]
    kept = [] if any(fails) else ["a", "b"]
    assert [store.kept for store in (own, *others)] == [kept] * 3
