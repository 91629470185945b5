"""Where a LoRA adapter fits on the device beside others, and which of them must go for it.

An adapter gets the lowest free slot, and the first free span of the adapter pool that is large
enough for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kiln.engine.errors import AdapterBusyError, AdapterError
from kiln.engine.lora.loaded_adapter import LoadedAdapter, Span

Adapters = list[LoadedAdapter]


def gaps(taken: Iterable[Span], size: int) -> Iterator[Span]:
    """Yield the free spans of a range of ``size`` elements, lowest first."""
    end = 0
    for span in sorted(taken):
        if span.start > end:
            yield Span(end, span.start - end)
        end = span.end
    if size > end:
        yield Span(end, size - end)


class Drain(NamedTuple):
    """``name`` waits for a place; only ``kept`` adapters and the pinned ones may be used."""

    name: str
    kept: frozenset[str]

    def is_overtaken(self, seen: Mapping[str, bool]) -> bool:
        """Whether a request that comes before all of ``name`` waits for the place of its adapter.

        ``seen``: the adapters of waiting requests in their order -> whether they have a place.
        """
        first = (one for one, placed in seen.items() if one == self.name or not placed)
        return next(first, self.name) != self.name


class Room(NamedTuple):
    """``num_slots`` slots, and a pool of ``size`` elements. ``there``: the adapters on the device.

    ``idle``: those of them that can go.
    """

    num_slots: int
    size: int

    def free_slot(self, there: Adapters) -> int | None:
        """Return the lowest free slot."""
        taken = {one.slot for one in there}
        return next((slot for slot in range(self.num_slots) if slot not in taken), None)

    def beside(self, there: Adapters, own: LoadedAdapter) -> tuple[int, int] | None:
        """Return the slot and the start of an adapter; None if there is no room."""
        slot, free = self.free_slot(there), gaps((one.span for one in there), self.size)
        start = next((gap.start for gap in free if gap.size >= own.size), None)
        return None if slot is None or start is None else (slot, start)

    def evicted_for(self, own: LoadedAdapter, there: Adapters, idle: Adapters) -> Adapters | None:
        """Return which must go, the least recently used first; None if there is still no room.

        Those whose memory is not in the way are spared.
        """
        idle = sorted((one for one in idle if not one.pinned), key=lambda one: one.used)
        staying, gone = list(there), Adapters()
        while not self.beside(staying, own):
            if not idle:
                return None
            gone.append(idle.pop(0))
            staying.remove(gone[-1])
        for one in gone[-2::-1]:
            if self.beside([*staying, one], own):
                staying.append(one)
                gone.remove(one)
        return gone

    def drained_for(self, own: LoadedAdapter, there: Adapters) -> Drain:
        """Choose which adapters lose their requests, those with the fewest first."""
        kept = [one for one in there if one.pinned or one.running]
        for one in sorted(kept, key=lambda one: one.running):
            if self.beside(kept, own):
                break
            if not one.pinned:
                kept.remove(one)
        return Drain(own.name, frozenset(one.name for one in kept))

    def fixed_start(self, own: LoadedAdapter, loaded: Adapters) -> int:
        """Return where an adapter fits beside the pinned ones. Raises AdapterError if nowhere.

        A pinned one must leave room to each of the others.
        """
        fixed = [one.span for one in loaded if one.pinned]
        free = list(gaps(fixed, self.size))
        start = next((gap.start for gap in free if gap.size >= own.size), None)
        if start is None:
            raise AdapterError(
                f"LoRA adapter {own.name!r}: takes {own.size} numbers, and the adapter pool has "
                f"{_largest(free)} of {self.size} in one piece beside pinned adapters: raise "
                "lora_memory_gib"
            )
        left = _largest(gaps([*fixed, Span(start, own.size)], self.size))
        most = max((one.size for one in loaded if not one.pinned), default=0)
        if own.pinned and (len(fixed) + 2 > self.num_slots or left < most):
            raise AdapterError(
                f"LoRA adapter {own.name!r}: pinned, it leaves no room to the others "
                f"({len(fixed)} pinned of {self.num_slots} slots, {left} numbers in one piece, "
                f"the largest other adapter takes {most}): load it without pinned"
            )
        return start

    def evicted_from(self, own: LoadedAdapter, there: Adapters, idle: Adapters) -> Adapters:
        """Return which must go from the span of a pinned one. Raises AdapterBusyError."""
        others = [one for one in there if not one.pinned]
        gone = [one for one in others if one.span.overlaps(own.span)]
        if not gone and len(there) == self.num_slots:
            gone = [min(others, key=lambda one: (one not in idle, one.used))]
        if any(one not in idle for one in gone):
            raise AdapterBusyError(
                f"LoRA adapter {own.name!r}: the place of a pinned adapter is in use: try again "
                "when fewer requests run, or load it without pinned"
            )
        return gone


def _largest(free: Iterable[Span]) -> int:
    return max((gap.size for gap in free), default=0)
