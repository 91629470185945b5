"""The adapters of the ranks that follow rank 0: what rank 0 does not keep, nobody keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kiln.engine.distributed.calls import Calls, encode_call
from kiln.engine.errors import AdapterError
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.runner.followed_store import FollowedStore
from kiln.engine.runner.lead_store import LeadStore


class Store:
    """An AdapterStore of which one call may fail, or some copies, each of which takes a wait."""

    num_slots, size, info = 3, 3, None

    def __init__(self, fails="", copies_fail=""):
        self.fails, self.copies_fail, self.sizes = fails, copies_fail, {}
        self.copies, self.slots = [], {}

    def read(self, name, path):
        if self.fails == "read":
            raise AdapterError("it is damaged")
        return SimpleNamespace(name=name)

    def add(self, packed):
        if self.fails == "add":
            raise AdapterError("above lora_host_memory_gib")
        self.sizes[packed.name] = 1

    def forget(self, name: str):
        del self.sizes[name]

    def begin(self, name, slot, start):
        self.copies.append((name, slot))

    def copied(self, *, wait=False):
        ended = self.copies[:wait]
        del self.copies[:wait]
        self.slots |= {slot: name for name, slot in ended if name not in self.copies_fail}
        failed = AdapterError("no memory")
        return [Copied(name, failed if name in self.copies_fail else None) for name, _ in ended]

    def clear(self, slot: int):
        self.copies = [copy for copy in self.copies if copy[1] != slot]
        self.slots.pop(slot, None)


class Ranks:
    """Followers, each of which gets the calls at once."""

    def __init__(self, *stores):
        self.failed = []
        self.followed = [
            FollowedStore(store, lambda error, rank=rank: self._replied(rank, error))
            for rank, store in enumerate(stores, 1)
        ]

    def _replied(self, rank, error):
        if error is not None:
            self.failed.append((rank, error))

    def call(self, method, *arguments):
        for followed in self.followed:
            Calls(*followed.calls()).run(encode_call(method, *arguments))

    def replies(self):
        for followed in self.followed:
            followed._thread.submit(int).result()  # what was read before has ended
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
    assert [followed._read for followed in ranks.followed] == [{}, {}]
    kept = {} if any(fails) else {"a": 1, "b": 1}
    assert [store.sizes for store in (own, *others)] == [kept] * 3
    for name in kept:
        lead.forget(name)
    assert not any(store.sizes for store in (own, *others))


@pytest.mark.parametrize("there", ["", "b"])
def test_other_ranks_publish_what_rank_0_has_copied_and_forget_what_failed_there(there):
    """Also if a copy that failed on rank 0 failed here too, or is still to end."""
    own, other = Store(copies_fail="b"), Store(copies_fail=there)
    lead = LeadStore(own, Ranks(other))
    for slot, name in enumerate("abc"):
        lead.begin(name, slot, slot)
    failed = []
    while ended := lead.copied(wait=True):
        failed += [name for name, error in ended if error is not None]
    assert failed == ["b"]
    assert other.slots[0] == "a"
    assert other.slots[2] == "c"
    lead.clear(1)
    assert own.slots == other.slots == {0: "a", 2: "c"}
    own.copies_fail = other.copies_fail = ""
    lead.begin("b", 1, 1)
    lead.copied(wait=True)
    assert own.slots == other.slots == {0: "a", 1: "b", 2: "c"}


def test_a_rank_that_cannot_copy_what_rank_0_has_copied_cannot_go_on():
    lead = LeadStore(Store(), Ranks(Store(copies_fail="a")))
    lead.begin("a", 0, 0)
    with pytest.raises(AdapterError, match="no memory"):
        lead.copied(wait=True)
