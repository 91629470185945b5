"""The LoRA adapters of rank 0, and the same calls for those of the other ranks, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kiln.engine.distributed.channel import Kind
from kiln.engine.distributed.followers import Followers
from kiln.engine.errors import AdapterError
from kiln.engine.lora.packing import PackedAdapter
from kiln.engine.lora.store import AdapterStore
from kiln.engine.requests.adapter_jobs import AdapterInfo
from kiln.engine.requests.loaded_adapter import Copied


class LeadStore:
    """An AdapterStore on all ranks. Each rank keeps a part of the same size of each adapter."""

    def __init__(self, own: AdapterStore, followers: Followers) -> None:
        self._own, self._followers = own, followers

    @property
    def num_slots(self) -> int:
        """How many adapters can be on the device."""
        return self._own.num_slots

    @property
    def size(self) -> int:
        """The elements of a rank's adapter pool."""
        return self._own.size

    @property
    def sizes(self) -> Mapping[str, int]:
        """The elements of each adapter in a rank's host memory."""
        return self._own.sizes

    def read(self, name: str, path: str) -> PackedAdapter:
        """Read an adapter on all ranks at once, in any thread. Raises AdapterError."""
        self._followers.tell(Kind.READ, {"name": name, "path": path})
        try:
            packed = self._own.read(name, path)
        except BaseException:
            self._followers.replies()  # must not be taken for those of the next READ
            self._followers.tell(Kind.DROP, name)
            raise
        for rank, error in self._followers.replies():
            self._followers.tell(Kind.DROP, name)
            raise AdapterError(f"rank {rank}: {error}")
        return packed

    def add(self, packed: Any, /) -> int:
        """Keep what ``read`` returned, and return its elements. Raises AdapterError."""
        try:
            elements = self._own.add(packed)
        except BaseException:
            self._followers.tell(Kind.DROP, packed.name)
            raise
        self._followers.tell(Kind.ADD, packed.name)
        return elements

    def forget(self, name: str) -> None:
        """Free the host memory of an adapter that is not in the pool."""
        self._own.forget(name)
        self._followers.tell(Kind.FORGET, name)

    def info(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        """Describe an adapter."""
        return self._own.info(name, path, pinned=pinned)

    def begin(self, name: str, slot: int, start: int) -> None:
        """Begin to copy an adapter to the elements of the pools from ``start`` on."""
        self._own.begin(name, slot, start)
        self._followers.tell(Kind.BEGIN, [name, slot, start])

    def copied(self, *, wait: bool = False) -> Sequence[Copied]:
        """Publish the adapters whose copies have ended here, and wait for the other ranks'."""
        ended = self._own.copied(wait=wait)
        for name, error in ended:
            if error is None:  # else the other ranks forget their copies when the slot is cleared
                self._followers.tell(Kind.PLACE, name)
        return ended

    def clear(self, slot: int) -> None:
        """Empty a slot; a copy to it that ``copied`` has not returned is forgotten."""
        self._own.clear(slot)
        self._followers.tell(Kind.CLEAR, slot)
