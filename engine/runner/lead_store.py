"""The LoRA adapters of rank 0, and the same calls for those of the other ranks, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kiln.engine.distributed.followers import Followers
from kiln.engine.errors import AdapterError
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.lora.packing import PackedAdapter
from kiln.engine.lora.store import RankStore
from kiln.engine.runner.followed_store import FollowedStore


class LeadStore:
    """An AdapterStore on all ranks. Each rank keeps a part of the same size of each adapter."""

    def __init__(self, own: RankStore, followers: Followers) -> None:
        self._own, self._call, self._replies = own, followers.call, followers.replies
        self.num_slots, self.size, self.sizes, self.info = (
            own.num_slots, own.size, own.sizes, own.info,
        )  # fmt: skip

    def read(self, name: str, path: str) -> PackedAdapter:
        """Read an adapter on all ranks at once, in any thread. Raises AdapterError."""
        self._call(FollowedStore.read, name, path)
        with self._or_dropped(name):
            try:
                packed = self._own.read(name, path)
            finally:
                failed = self._replies()  # else they would be taken for those of the next one
            for rank, error in failed:
                raise AdapterError(f"rank {rank}: {error}")
        return packed

    def add(self, packed: Any, /) -> None:
        """Keep what ``read`` returned. Raises AdapterError."""
        with self._or_dropped(packed.name):
            self._own.add(packed)
        self._call(FollowedStore.add, packed.name)

    def forget(self, name: str) -> None:
        """Free the host memory of an adapter that is not in the pool."""
        self._own.forget(name)
        self._call(RankStore.forget, name)

    def begin(self, name: str, slot: int, start: int) -> None:
        """Begin to copy an adapter to the elements of the pools from ``start`` on."""
        self._own.begin(name, slot, start)
        self._call(FollowedStore.begin, name, slot, start)

    def copied(self, *, wait: bool = False) -> Sequence[Copied]:
        """Publish the adapters whose copies have ended here, and wait for the other ranks'."""
        ended = self._own.copied(wait=wait)
        for name, error in ended:
            if error is None:  # else the other ranks forget their copies when the slot is cleared
                self._call(FollowedStore.place, name)
        return ended

    def clear(self, slot: int) -> None:
        """Empty a slot; a copy to it that ``copied`` has not returned is forgotten."""
        self._own.clear(slot)
        self._call(RankStore.clear, slot)

    @contextmanager
    def _or_dropped(self, name: str) -> Iterator[None]:
        """Let no rank keep an adapter if the block raises."""
        try:
            yield
        except BaseException:
            self._call(FollowedStore.drop, name)
            raise
