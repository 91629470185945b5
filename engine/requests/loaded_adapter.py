"""A loaded LoRA adapter, as admission sees it, and what copies it to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kiln.engine.errors import AdapterError
from kiln.engine.requests.spans import Span


class Copied(NamedTuple):
    """A copy to the device that has ended. ``error``: why it failed, with the adapter's name."""

    name: str
    error: AdapterError | None = None


class Mover(Protocol):
    """What copies adapters to the device."""

    def begin(self, name: str, slot: int, start: int) -> None:
        """Begin to copy an adapter to the elements of the pool from ``start`` on."""

    def copied(self, *, wait: bool = False) -> Sequence[Copied]:
        """Return the copies that have ended, each once; slots whose copies succeeded can be used.

        With ``wait``, first wait for the oldest copy, if there is any.
        """

    def clear(self, slot: int) -> None:
        """Empty a slot; a copy to it that ``copied`` has not returned is forgotten."""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A loaded adapter. ``size``: elements of the pool. ``slot`` and ``start``: -1 on the host."""

    name: str
    size: int
    pinned: bool = False
    slot: int = -1
    start: int = -1
    copying: bool = False
    ready: bool = False  # the copy has succeeded
    leaving: bool = False  # being unloaded: takes no new requests
    requests: int = 0  # waiting and running
    running: int = 0
    used: int = 0  # the number of the pass that used it last
    placements: int = 0  # copies to the device since it was loaded
    tokens: int = 0  # generated since it was loaded

    def restart(self, requests: int) -> None:
        """Let ``requests`` requests wait for it, as if it had never been on the device.

        A pinned one keeps its place; its next request copies it there.
        """
        self.requests, self.running = requests, 0
        self.copying = self.ready = False
        if not self.pinned:
            self.slot = self.start = -1

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for it."""
        return self.requests > self.running

    @property
    def span(self) -> Span:
        """Its part of the pool."""
        return Span(self.start, self.size)


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
