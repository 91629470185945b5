"""A loaded LoRA adapter, as admission sees it, and the store that copies it to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kiln.engine.errors import AdapterError
from kiln.engine.requests.adapter_job import AdapterInfo


class Span(NamedTuple):
    """``size`` elements of the pool from ``start`` on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first element behind it."""
        return self.start + self.size

    def overlaps(self, other: Span) -> bool:
        """Whether the two share an element."""
        return self.start < other.end and other.start < self.end


class Copied(NamedTuple):
    """A copy to the device that has ended. ``error``: why it failed, with the adapter's name."""

    name: str
    error: AdapterError | None = None


class AdapterStore(Protocol):
    """What reads adapters, keeps them in host memory, and copies them to the device."""

    num_slots: int  # adapters that can be on the device
    size: int  # elements of the adapter pool
    sizes: dict[str, int]  # the elements of each adapter in host memory

    def read(self, name: str, path: str) -> Any:
        """Read and check an adapter of ``lora_root``, in any thread. Raises AdapterError."""

    def add(self, packed: Any, /) -> None:
        """Keep what ``read`` returned. Raises AdapterError."""

    def forget(self, name: str) -> None:
        """Free the host memory of an adapter that is not on the device."""

    def info(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        """Describe an adapter."""

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
    """A loaded adapter. ``size``: elements of the pool. ``slot`` and ``start``: -1 on the host.

    ``load`` is given once: another load of the same name may have other weights.
    """

    name: str
    size: int
    load: int
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
