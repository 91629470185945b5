"""Cancel work when the client disconnects, for whole and streamed responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work`` and return its result; cancel it when the client disconnects.

    Starlette cancels neither a plain handler nor, on new servers, a stream that sends nothing at
    the moment: a queued request would run to its end in vain. Raises ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnection(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
