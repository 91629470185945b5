"""Which LoRA adapters are on the device, and which waiting requests may run with theirs.

All loaded adapters are in host memory. Those on the device have a slot, and a span of the adapter
pool of exactly their size.

    on host --place--> copying --copied--> resident --evict--> on host

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
from collections.abc import Callable, Iterable, Sequence, Set

from kiln.engine.errors import AdapterBusyError, AdapterError, AdapterNotFoundError
from kiln.engine.requests.loaded_adapter import Drain, LoadedAdapter, Mover
from kiln.engine.requests.request import Request, TokenOutput
from kiln.engine.requests.spans import Span, first_fit, largest_gap

PATIENCE = 2.0  # seconds
_SHOWN = 400  # characters of names in a message


class AdapterSlots:
    """The loaded adapters of an engine with ``num_slots`` slots and a pool of ``size`` elements."""

    def __init__(
        self,
        num_slots: int = 0,
        size: int = 0,
        mover: Mover | None = None,
        *,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_slots = num_slots
        self.size = size
        self.num_evictions = 0
        self._mover = mover
        self._patience = patience
        self._clock = clock
        self._loaded: dict[str, LoadedAdapter] = {}
        self._passes = 0
        self._now = 0.0
        self._in_flight: Callable[[], Set[int]] = frozenset
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

    def add(self, name: str, size: int, pinned: bool, in_flight: Set[int] = frozenset()) -> None:
        """Add a loaded adapter; a pinned one gets its place at once.

        ``in_flight``: the slots that launched steps use. Raises AdapterError if it could never run
        beside the pinned ones, or could keep others from it; AdapterBusyError if the place of a
        pinned one is in use.
        """
        assert name not in self._loaded, f"{name} is loaded"
        own = LoadedAdapter(name, size, pinned)
        fixed = [one.span for one in self._loaded.values() if one.pinned]
        start = first_fit(fixed, self.size, size)
        if start is None:
            raise AdapterError(
                f"LoRA adapter {name!r}: takes {size} numbers, and the adapter pool has "
                f"{largest_gap(fixed, self.size)} of {self.size} in one piece beside pinned "
                "adapters: raise lora_memory_gib"
            )
        if pinned:
            self._pin(own, start, fixed, in_flight)
        self._loaded[name] = own

    def reopen(self, name: str) -> LoadedAdapter:
        """Let an adapter take requests again, and return it."""
        self._loaded[name].leaving = False
        return self._loaded[name]

    def remove(self, name: str, in_flight: Set[int]) -> bool:
        """Forget an adapter and free its place; return False if it is still in use."""
        own = self._loaded[name]
        if own.requests or (own.slot >= 0 and not self._is_idle(own, in_flight)):
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
            start = first_fit(self._spans(), self.size, own.size)
            slot = self._free_slot()
            if own.slot < 0 and start is not None and slot is not None:
                self._put(own, slot, start)
        while any(one.copying for one in self._loaded.values()):
            self.wait()
        for error in self._failed.values():
            raise error

    def begin_pass(self, in_flight: Callable[[], Set[int]]) -> None:
        """Begin the admission of a step. ``in_flight`` returns the slots of launched steps."""
        self._passes += 1
        self._now = self._clock()
        self._in_flight = in_flight
        self._seen = {}
        self.collect()

    def slot_for(self, name: str) -> int | None:
        """Return the slot of an adapter that a request may use now; None: pass the request over.

        May begin to copy it to the device.
        """
        own, drain = self._loaded[name], self._drain
        if name in self._failed:  # its requests are about to fail
            return None
        stays = drain is None or own.pinned or name == drain.name or name in drain.kept
        may_move = drain is None or name == drain.name
        tried = name in self._seen
        if not stays or (own.slot < 0 and (tried or not may_move or not self._place(own))):
            self._seen[name] = False
            return None
        self._seen[name] = True
        if not own.ready:
            if own.slot >= 0 and not own.copying:  # a pinned one whose last copy failed
                self._put(own, own.slot, own.start)
            return None
        own.used = self._passes
        return own.slot

    def end_pass(self, *, in_order: bool = False) -> None:
        """End the admission of a step: see who waits for a place, and whether to drain for one.

        The queue may not have been read to its end: who was not reached goes on waiting. Drains
        ``in_order`` are only for the first in the queue that waits for a place.
        """
        waiting = [name for name, placed in self._seen.items() if not placed]
        unseen = (name for name in self._since if name not in self._seen)
        waiting += [name for name in unseen if self._loaded[name].is_waited_for]
        self._since = {name: self._since.get(name, self._now) for name in waiting}
        drain = self._drain
        served = drain and self._loaded.get(drain.name)
        overtaken = in_order and drain is not None and drain.is_overtaken(self._seen)
        if overtaken or served is None or served.running or not served.is_waited_for:
            self._drain = None
        if self._drain is None:
            late = filter(self._is_late, waiting[:1] if in_order else waiting)
            name = next(late, None)
            self._drain = None if name is None else self._drain_for(self._loaded[name])

    def hold(self, name: str) -> None:
        """Count a new request of an adapter. Raises AdapterNotFoundError."""
        own = self.get(name)
        if not own.is_waited_for:  # a copy that failed before concerns no request
            self._failed.pop(name, None)
        own.requests += 1

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

    def collect(self, *, wait: bool = False) -> None:
        """Make the adapters ready whose copies have ended."""
        for name, error in () if self._mover is None else self._mover.copied(wait=wait):
            own = self._loaded[name]
            own.copying, own.ready = False, error is None
            if error is not None:
                self._failed[name] = error
                if not own.pinned:
                    self._take_off(own)

    def wait(self) -> None:
        """Wait until a copy to the device has ended, if there is any."""
        self.collect(wait=True)

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
            if own.slot >= 0 and self._mover is not None:
                self._mover.clear(own.slot)
            own.restart(requests[own.name])

    def _is_late(self, name: str) -> bool:
        return self._loaded[name].slot < 0 and self._now - self._since[name] >= self._patience

    def _spans(self) -> list[Span]:
        return [one.span for one in self._loaded.values() if one.slot >= 0]

    def _free_slot(self) -> int | None:
        taken = {one.slot for one in self._loaded.values()}
        return next((slot for slot in range(self.num_slots) if slot not in taken), None)

    def _is_idle(self, own: LoadedAdapter, in_flight: Set[int]) -> bool:
        return not own.copying and not own.running and own.slot not in in_flight

    def _place(self, own: LoadedAdapter) -> bool:
        """Put an adapter on the device, and evict idle ones for it; False if there is no room."""
        in_flight = self._in_flight()
        there = [one for one in self._loaded.values() if one.slot >= 0]
        idle = [one for one in there if not one.pinned and self._is_idle(one, in_flight)]
        idle.sort(key=lambda one: one.used)
        evicted: list[LoadedAdapter] = []
        while not self._fits(own, there, evicted):
            if len(evicted) == len(idle):
                return False
            evicted = idle[: len(evicted) + 1]
        for one in evicted[-2::-1]:  # spare those whose memory is not in the way
            without = [other for other in evicted if other is not one]
            if self._fits(own, there, without):
                evicted = without
        for one in evicted:
            self._evict(one)
        slot, start = self._free_slot(), first_fit(self._spans(), self.size, own.size)
        assert slot is not None
        assert start is not None
        self._put(own, slot, start)
        self.collect()
        return True

    def _fits(
        self,
        own: LoadedAdapter,
        there: Sequence[LoadedAdapter],
        without: Iterable[LoadedAdapter] = (),
    ) -> bool:
        gone = {one.name for one in without}
        spans = [one.span for one in there if one.name not in gone]
        return len(spans) < self.num_slots and first_fit(spans, self.size, own.size) is not None

    def _put(self, own: LoadedAdapter, slot: int, start: int) -> None:
        own.slot, own.start, own.used = slot, start, self._passes
        own.copying, own.ready = True, False
        own.placements += 1
        assert self._mover is not None
        self._mover.begin(own.name, slot, start)

    def _evict(self, own: LoadedAdapter) -> None:
        self.num_evictions += 1
        self._take_off(own)

    def _take_off(self, own: LoadedAdapter) -> None:
        assert self._mover is not None
        self._mover.clear(own.slot)
        own.slot, own.start, own.ready = -1, -1, False

    def _drain_for(self, own: LoadedAdapter) -> Drain:
        """Choose which adapters lose their requests, those with the fewest first."""
        there = [one for one in self._loaded.values() if one.slot >= 0]
        kept = [one for one in there if one.pinned or one.running]
        for one in sorted(kept, key=lambda one: one.running):
            if self._fits(own, kept):
                break
            if not one.pinned:
                kept.remove(one)
        return Drain(own.name, frozenset(one.name for one in kept))

    def _pin(
        self, own: LoadedAdapter, start: int, fixed: Sequence[Span], in_flight: Set[int]
    ) -> None:
        """Place an adapter for good, as low as other pinned ones allow."""
        own.start = start
        others = [one for one in self._loaded.values() if not one.pinned]
        left = largest_gap([*fixed, own.span], self.size)
        most = max((one.size for one in others), default=0)
        if len(fixed) + 2 > self.num_slots or left < most:
            raise AdapterError(
                f"LoRA adapter {own.name!r}: pinned, it leaves no room to the others "
                f"({len(fixed)} pinned of {self.num_slots} slots, {left} numbers in one piece, "
                f"the largest other adapter takes {most}): load it without pinned"
            )
        there = [one for one in others if one.slot >= 0]
        evicted = [one for one in there if one.span.overlaps(own.span)]
        idle = [one for one in there if self._is_idle(one, in_flight) and one not in evicted]
        if not evicted and self._free_slot() is None:
            evicted = sorted(idle, key=lambda one: one.used)[:1]
        if not all(self._is_idle(one, in_flight) for one in evicted) or (
            not evicted and self._free_slot() is None
        ):
            raise AdapterBusyError(
                f"LoRA adapter {own.name!r}: the place of a pinned adapter is in use: try again "
                "when fewer requests run, or load it without pinned"
            )
        for one in evicted:
            self._evict(one)
        slot = self._free_slot()
        assert slot is not None
        self._put(own, slot, start)
