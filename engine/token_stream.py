"""The reading end of one or more generations, in the API process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from kiln.engine.errors import KilnError
from kiln.engine.request import TokenOutput


class TokenStream:
    """Iterates over the outputs of its requests as they arrive, in the engine's order.

    It ends when each request has finished or was dropped. Closing it, or leaving its ``async
    with``, aborts what is left. An error put into it is raised from the iteration.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._open = set(request_ids)
        self._abort = abort
        self._queue: asyncio.Queue[TokenOutput | KilnError] = asyncio.Queue()

    def put(self, item: TokenOutput | KilnError) -> None:
        """Add what the engine sent, for the reader."""
        self._queue.put_nowait(item)

    def drop(self, request_id: str) -> None:
        """Abort one request, because its reader has all it wanted."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort([request_id])

    async def aclose(self) -> None:
        """Abort every request that has not finished."""
        left, self._open = sorted(self._open), set()
        self._abort(left)

    def __aiter__(self) -> TokenStream:
        """Return the stream itself: it is read once."""
        return self

    async def __anext__(self) -> TokenOutput:
        """Return the next output. Raises EngineDeadError or RequestError if the engine failed."""
        while self._open:
            item = await self._queue.get()
            if isinstance(item, KilnError):
                await self.aclose()
                raise item
            if item.request_id in self._open:
                if item.finish_reason is not None:
                    self._open.discard(item.request_id)
                return item
        raise StopAsyncIteration

    async def __aenter__(self) -> TokenStream:
        """Return the stream."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort what is left."""
        await self.aclose()
