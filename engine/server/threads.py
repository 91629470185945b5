"""Run work outside the event loop, so that other requests are not blocked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from kiln.engine.server.disconnect import unless_gone

SMALL = 4096  # bytes of input that take less than a millisecond: little more than another thread
LARGE = 32_768  # bytes of input that take tens of milliseconds
_LARGE_AT_ONCE = 2

T = TypeVar("T")


class Threads:
    """Runs large work in few threads, so that CPU time remains for small work."""

    def __init__(self) -> None:
        self._few = CapacityLimiter(_LARGE_AT_ONCE)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return the result of ``work``; ``size`` is the size of its input in bytes."""
        return await to_thread.run_sync(work, limiter=self._few if size >= LARGE else None)

    async def run_for(self, request: Request, work: Callable[[], T]) -> T:
        """Return the result of work on a body that was read. Raises ClientDisconnect.

        Work on a small one runs at once, in the event loop.
        """
        size = len(await request.body())  # cached
        if size < SMALL:
            return work()
        return await unless_gone(request.receive, self.run(work, size))
