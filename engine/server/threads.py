"""Work that is done beside the event loop, so that other requests go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

LARGE = 32_768  # bytes of input from which on work is large: tens of milliseconds
_LARGE_AT_ONCE = 2

T = TypeVar("T")


class Threads:
    """Runs large work in few threads, so that it leaves the processor to small work."""

    def __init__(self) -> None:
        self._few = CapacityLimiter(_LARGE_AT_ONCE)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return what ``work`` returns; ``size`` is that of its input in bytes."""
        return await to_thread.run_sync(work, limiter=self._few if size >= LARGE else None)
