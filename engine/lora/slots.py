"""Which LoRA adapters are on the device, and which waiting requests may run with theirs.

All loaded adapters are in host memory. Those on the device have a slot, and a span of the adapter
pool of exactly their size.

    on host --place--> copying --copied--> ready --evict--> on host

A copy that fails puts its adapter back on the host, and the requests that wait for it fail. A
pinned adapter keeps its place, and its next request copies it again.

An adapter is evicted only while it is idle: no running request uses it, and no launched step whose
tokens are unknown. Of the idle ones the least recently used goes first; a pinned one never goes.
Each step's admission is one pass:

    slots or memory are short    a request is passed over; those behind it may be admitted
    for ``patience`` seconds     then the pool is drained for its adapter: enough of the running
                                 adapters get no new requests, and nothing else is placed, until
                                 one of its requests runs

Requests of the base model are never passed over here. A drain ends: the adapters that stay leave
enough room, because each adapter fits beside the pinned ones, and the others lose their requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from itertools import count

from kiln.engine.errors import AdapterError, AdapterNotFoundError
from kiln.engine.lora.loaded_adapter import AdapterStore, LoadedAdapter
from kiln.engine.lora.room import Drain, Room
from kiln.engine.requests.request import Request, TokenOutput

PATIENCE = 2.0  # seconds
_SHOWN = 400  # characters of names in a message


class AdapterSlots:
    """The loaded adapters of an engine, and their places on the device; without a store none.

    ``in_flight`` returns the slots that launched steps use; the scheduler sets it.
    """

    def __init__(
        self,
        store: AdapterStore | None = None,
        *,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.in_flight: Callable[[], Set[int]] = frozenset
        self.num_evictions = 0
        self._room = Room(0, 0) if store is None else Room(store.num_slots, store.size)
        self._patience, self._clock = patience, clock
        self._loaded: dict[str, LoadedAdapter] = {}
        self._loads = count(1)
        self._passes = 0
        self._seen: dict[str, bool] = {}  # in this pass, in its order: whether it has a place
        self._since: dict[str, float] = {}  # since when they are wanted without a place
        self._drain: Drain | None = None
        self._failed: dict[str, AdapterError] = {}  # by name, why the last copy failed

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """All adapters."""
        return list(self._loaded.values())

    def get(self, name: str) -> LoadedAdapter:
        """Return an adapter that takes requests. Raises AdapterNotFoundError."""
        own = self._loaded.get(name)
        if own is not None and not own.leaving:
            return own
        what = "is being unloaded" if own is not None else "is not loaded"
        known = [one.name for one in self._loaded.values() if not one.leaving]
        raise AdapterNotFoundError(
            f"LoRA adapter {name[:80]!r} {what}; loaded: {(', '.join(known) or 'none')[:_SHOWN]}",
            "lora",
        )

    def add(self, name: str, size: int, pinned: bool) -> None:
        """Add a loaded adapter; a pinned one gets its place at once.

        Raises AdapterError if it could never run beside the pinned ones, or could keep others from
        it; AdapterBusyError if the place of a pinned one is in use.
        """
        assert name not in self._loaded, f"{name} is loaded"
        own = LoadedAdapter(name, size, next(self._loads), pinned)
        start = self._room.fixed_start(own, self.loaded)
        if pinned:
            own.start = start
            self._evict(self._room.evicted_from(own, self._there(), self._idle()))
            slot = self._room.free_slot(self._there())
            assert slot is not None
            self._copy(own, slot, start)
        self._loaded[name] = own

    def remove(self, name: str) -> bool:
        """Forget an adapter and free its place; return False if it is still in use."""
        own = self._loaded[name]
        if own.requests or (own.slot >= 0 and own not in self._idle()):
            return False
        if own.slot >= 0:
            self._take_off(own)
        del self._loaded[name]
        self._since.pop(name, None)
        self._failed.pop(name, None)
        return True

    def place_all(self) -> None:
        """Place adapters while there is room, before the first request comes, and wait for them.

        Raises AdapterError if one cannot be copied.
        """
        for own in self._loaded.values():
            place = self._room.beside(self._there(), own)
            if own.slot < 0 and place is not None:
                self._copy(own, *place)
        while any(one.copying for one in self._loaded.values()):
            self.collect(wait=True)
        for error in self._failed.values():
            raise error

    def hold(self, name: str) -> int:
        """Count a new request of an adapter and return its load. Raises AdapterNotFoundError."""
        own = self.get(name)
        if not own.is_waited_for:  # a copy that failed before concerns no request
            self._failed.pop(name, None)
        own.requests += 1
        return own.load

    def drop(self, name: str) -> None:
        """Forget a request that was counted."""
        self._loaded[name].requests -= 1

    def start(self, name: str) -> None:
        """Count a request that begins to run."""
        self._loaded[name].running += 1

    def stop(self, name: str) -> None:
        """Count a request that ends or is preempted."""
        own = self._loaded[name]
        own.running -= 1
        own.used = self._passes

    def count(self, name: str, num_tokens: int) -> None:
        """Count tokens that were generated with an adapter."""
        self._loaded[name].tokens += num_tokens

    def begin_pass(self) -> None:
        """Begin the admission of a step."""
        self._passes += 1
        self._seen = {}
        self.collect()

    def slot_for(self, name: str) -> int | None:
        """Return the slot of an adapter that a request may use now; None: pass the request over.

        May begin to copy it to the device.
        """
        own, drain = self._loaded[name], self._drain
        if name in self._failed:  # its requests are about to fail
            return None
        may_move = drain is None or name == drain.name
        if own.slot < 0:
            placed = may_move and name not in self._seen and self._place(own)
        else:
            placed = may_move or own.pinned or (drain is not None and name in drain.kept)
        self._seen[name] = placed
        if placed and own.ready:
            own.used = self._passes
            return own.slot
        if placed and own.slot >= 0 and not own.copying:  # a pinned one whose last copy failed
            self._copy(own, own.slot, own.start)
        return None

    def end_pass(self, *, in_order: bool = False) -> None:
        """End the admission of a step: see who waits for a place, and whether to drain for one.

        The queue may not have been read to its end: who was not reached goes on waiting. Drains
        ``in_order`` are only for the first in the queue that waits for a place.
        """
        now, drain = self._clock(), self._drain
        waiting = [name for name, placed in self._seen.items() if not placed]
        unseen = (name for name in self._since if name not in self._seen)
        waiting += [name for name in unseen if self._loaded[name].is_waited_for]
        self._since = {name: self._since.get(name, now) for name in waiting}
        served = drain and self._loaded.get(drain.name)
        overtaken = in_order and drain is not None and drain.is_overtaken(self._seen)
        if overtaken or served is None or served.running or not served.is_waited_for:
            self._drain = None
            for name in waiting[:1] if in_order else waiting:
                own = self._loaded[name]
                if own.slot < 0 and now - self._since[name] >= self._patience:
                    self._drain = self._room.drained_for(own, self._there())
                    break

    def collect(self, *, wait: bool = False) -> None:
        """Make the adapters ready whose copies have ended; ``wait`` until one has, if there is any.

        The requests of those whose copies failed fail.
        """
        for name, error in () if self.store is None else self.store.copied(wait=wait):
            own = self._loaded[name]
            own.copying, own.ready = False, error is None
            if error is not None:
                self._failed[name] = error
                if not own.pinned:
                    self._take_off(own)

    def fail_waiting(self, waiting: Iterable[Request]) -> list[TokenOutput]:
        """Return the ends of those of the waiting requests whose adapters could not be copied.

        The caller drops these requests. Later requests of the same adapters copy them again.
        """
        failed, self._failed = self._failed, {}
        return [
            TokenOutput(request.request_id, [], "error", message=f"{failed[request.adapter]}")
            for request in waiting
            if request.adapter in failed
        ]

    def rebuild(self, wanted: Iterable[str]) -> None:
        """Make all state anew, after an exception at any line; ``wanted``: by waiting requests."""
        self._seen, self._since, self._drain, self._failed = {}, {}, None, {}
        requests = Counter(wanted)
        for own in self._loaded.values():
            if own.slot >= 0 and self.store is not None:
                self.store.clear(own.slot)
            own.restart(requests[own.name])

    def _there(self) -> list[LoadedAdapter]:
        return [one for one in self._loaded.values() if one.slot >= 0]

    def _idle(self) -> list[LoadedAdapter]:
        used = self.in_flight()
        idle = (one for one in self._there() if not one.copying and not one.running)
        return [one for one in idle if one.slot not in used]

    def _place(self, own: LoadedAdapter) -> bool:
        """Put an adapter on the device, and evict idle ones for it; False if there is no room."""
        gone = self._room.evicted_for(own, self._there(), self._idle())
        if gone is None:
            return False
        self._evict(gone)
        place = self._room.beside(self._there(), own)
        assert place is not None
        self._copy(own, *place)
        self.collect()
        return True

    def _copy(self, own: LoadedAdapter, slot: int, start: int) -> None:
        own.slot, own.start, own.used = slot, start, self._passes
        own.copying, own.ready = True, False
        own.placements += 1
        assert self.store is not None
        self.store.begin(own.name, slot, start)

    def _evict(self, gone: Iterable[LoadedAdapter]) -> None:
        for one in gone:
            self.num_evictions += 1
            self._take_off(one)

    def _take_off(self, own: LoadedAdapter) -> None:
        assert self.store is not None
        self.store.clear(own.slot)
        own.slot, own.start, own.ready = -1, -1, False
