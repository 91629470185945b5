"""The host tier of the prefix cache: blocks that are kept in host memory, and come back on a hit.

    store   a block that was indexed is copied to a host slot, while steps run. Its contents do not
            change as long as it is indexed, so nobody need hold it: a block that was evicted
            before its copy ended has another uid then, and the copy is dropped.
    evict   a block with a copy stays known by its host slot; the eviction itself copies nothing.
    load    the slots that continue the known beginning of a waiting request are copied to new
            blocks. When that has ended the blocks are indexed, and held until the request runs.

Slots are replaced in the order of their last use. Blocks that are held for loads never keep a
running request from going on, nor one that is ahead in the queue from running: ``give_way`` frees
them. So that this ends, a waiting request loads a few times at most, and is computed then.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.host_blocks import HostBlocks
from kiln.engine.requests.request import Request

STORE_BLOCKS = 128  # that one copy stores
LEAST_LOADED = 4  # blocks: fewer are computed in less time than a request is passed over
MOST_LOADS = 3  # of one request, each time it waits

logger = logging.getLogger(__name__)


class Moved(NamedTuple):
    """A block and a slot of a copy, and the uid of the contents."""

    block: int
    slot: int
    uid: int


@dataclass(slots=True)
class Copy:
    """A copy that has begun; a load holds blocks, for ``request`` if that still waits."""

    moved: list[Moved]
    is_load: bool = False
    held: list[int] = field(default_factory=list)
    request: Request | None = None


class HostTier:
    """What is in the slots of ``host``, for the index of a pool, and the copies in flight."""

    def __init__(self, host: HostBlocks, pool: BlockPool) -> None:
        self._host = host
        self.num_slots = host.num_slots
        self.num_stored = self.num_loaded = 0  # blocks
        self.restart(pool)

    def restart(self, pool: BlockPool) -> None:
        """Forget everything, after the copies in flight have ended; ``pool`` is a new one."""
        self._host.drain()
        self._pool, self._index = pool, pool.index
        self._free = list(range(self.num_slots))[::-1]
        self._used: OrderedDict[int, None] = OrderedDict()  # no copy in flight; the oldest first
        self._copies: deque[Copy] = deque()
        self._queue: deque[tuple[int, int]] = deque(maxlen=pool.num_blocks)  # block and uid
        self._coming: set[int] = set()  # the places of slots that are being loaded
        self._held: dict[Request, list[int]] = {}  # blocks of loads that have ended

    @property
    def num_used(self) -> int:
        """The number of slots in use."""
        return self.num_slots - len(self._free)

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way to the device."""
        return bool(self._coming)

    def num_on_device(self, places: Sequence[int]) -> int:
        """Return how many places of a run are blocks, before the first host slot."""
        end = self._pool.num_blocks
        if not places or max(places) < end:
            return len(places)
        return next(index for index, place in enumerate(places) if place >= end)

    def is_coming(self, places: Iterable[int]) -> bool:
        """Whether one of the places is being loaded."""
        return not self._coming.isdisjoint(places)

    def is_worth_loading(self, request: Request, places: Iterable[int]) -> bool:
        """Whether to load what of a run is on the host, rather than to compute it."""
        absent = sum(place >= self._pool.num_blocks for place in places)
        return absent >= LEAST_LOADED and request.prefix.num_loads < MOST_LOADS

    def load(self, request: Request, places: Sequence[int]) -> None:
        """Begin to load the run of a waiting request, for which there is room.

        Its blocks that are on the device are held too.
        """
        pool, index, first_slot = self._pool, self._index, self._pool.num_blocks
        request.prefix.num_loads += 1
        self.drop(request)
        present = [place for place in places if place < first_slot]
        absent = [place for place in places if place >= first_slot]
        pool.share(present)
        blocks = pool.allocate(len(absent))
        assert blocks is not None, "the caller has checked that they fit"
        slots = [place - first_slot for place in absent]
        for slot in slots:
            del self._used[slot]
        self._coming.update(absent)
        moved = [*map(Moved, blocks, slots, map(index.uid, absent))]
        self._copies.append(Copy(moved, True, [*present, *blocks], request))
        self._host.load(blocks, slots)

    def keep(self, blocks: Iterable[int]) -> None:
        """Store blocks that were indexed just now."""
        for block in blocks:
            if uid := self._index.uid(block):  # else another block with the same contents is
                self._queue.append((block, uid))

    def touch(self, blocks: Iterable[int]) -> None:
        """Note that the contents of blocks were used, by the one to be replaced first."""
        used, twin, first_slot = self._used, self._index.twin, self._pool.num_blocks
        for block in blocks:
            slot = twin(block) - first_slot
            if slot in used:
                used.move_to_end(slot)

    def collect(self, *, wait: bool = False) -> None:
        """Take note of the copies that have ended, and begin to store blocks.

        With ``wait``, first wait until the next load has ended, if one is in flight.
        """
        while True:
            has_loaded = False
            for error in self._host.ended(wait=wait and self.is_loading):
                has_loaded |= self._end(self._copies.popleft(), error)
            if has_loaded or not (wait and self.is_loading):
                break
        if self._queue and all(copy.is_load for copy in self._copies):
            self._store()

    def drop(self, request: Request) -> None:
        """Hold no blocks for a request any more: it runs and holds them itself, or it has ended."""
        for copy in self._copies:
            if copy.request is request:
                copy.request = None
        if request in self._held:
            self._pool.free(reversed(self._held.pop(request)))

    def give_way(self, request: Request | None = None, *, wait: bool = False) -> bool:
        """Free what is held for requests whose loads have ended, but for ``request``.

        With ``wait`` all loads end first. Returns whether anything was freed.
        """
        while wait and self.is_loading:
            self.collect(wait=True)
        others = [one for one in self._held if one is not request]
        for one in others:
            self.drop(one)
        return bool(others)

    def forget_all(self) -> None:
        """Forget what the slots hold; the index is about to be cleared."""
        self.give_way()
        self._free.extend(self._used)
        self._used.clear()
        self._queue.clear()

    def _end(self, copy: Copy, error: Exception | None) -> bool:
        """Take note of a copy that has ended; return whether it was a load."""
        if error is not None:
            logger.warning(
                "copying %d KV blocks %s host memory failed, they are computed again: %r",
                len(copy.moved), "from" if copy.is_load else "to", error,
            )  # fmt: skip
        if copy.is_load:
            self._end_load(copy, error is None)
        else:
            self._end_store(copy, error is None)
        return copy.is_load

    def _end_store(self, copy: Copy, is_there: bool) -> None:
        for block, slot, uid in reversed(copy.moved):  # the ends of sequences are replaced first
            if is_there and self._index.uid(block) == uid:
                self._index.pair(block, self._pool.num_blocks + slot)
                self._used[slot] = None
                self.num_stored += 1
            else:
                self._free.append(slot)

    def _end_load(self, copy: Copy, is_there: bool) -> None:
        index = self._index
        for block, slot, uid in reversed(copy.moved):
            place = self._pool.num_blocks + slot
            self._coming.discard(place)
            if index.uid(place) != uid:  # the index was cleared
                self._free.append(slot)
            elif not is_there:
                index.forget(place)
                self._free.append(slot)
            else:
                self._used[slot] = None
                if index.twin(place) < 0:  # else a request has computed the same meanwhile
                    index.pair(place, block)
                    self.num_loaded += 1
        keeps = copy.request is not None
        self._pool.free(one for one in reversed(copy.held) if not (keeps and one in index))
        if copy.request is not None:
            self._held[copy.request] = [one for one in copy.held if one in index]

    def _store(self) -> None:
        """Begin to store the blocks that wait for it longest, if they still have their contents."""
        index, moved = self._index, list[Moved]()
        while self._queue and len(moved) < STORE_BLOCKS:
            block, uid = self._queue.popleft()
            if index.uid(block) == uid and index.twin(block) < 0:
                slot = self._free_slot()
                if slot is None:
                    break
                moved.append(Moved(block, slot, uid))
        if moved:
            self._copies.append(Copy(moved))
            self._host.store([one.block for one in moved], [one.slot for one in moved])

    def _free_slot(self) -> int | None:
        """Return a slot, if need be the least recently used; None: all are being copied."""
        if self._free:
            return self._free.pop()
        if not self._used:
            return None
        slot, _ = self._used.popitem(last=False)
        self._index.forget(self._pool.num_blocks + slot)
        return slot
