"""The output stream of one or more requests, in the API process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kiln.engine.errors import KilnError, SlowReaderError
from kiln.engine.requests.request import TokenOutput, merged

MAX_WAITING_TOKENS = 1024  # of one request: seconds of unread output


class TokenStream:
    """Iterates over the outputs of its requests as they arrive.

    Unread outputs of a request are merged, so at most one per request is queued. The stream ends
    when each request has finished or was dropped. Closing it, as by ``contextlib.aclosing``, aborts
    unfinished requests. An error put into it is raised from the iteration. A reader that falls too
    far behind gets SlowReaderError, and its requests are aborted.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._open = set(request_ids)
        self._abort = abort
        self._waiting: dict[str, TokenOutput] = {}  # by request
        self._error: KilnError | None = None
        self._arrived = asyncio.Event()

    def put(self, item: TokenOutput | KilnError) -> None:
        """Queue a message of the engine for the reader."""
        if isinstance(item, KilnError):
            self._error = self._error or item
        elif item.request_id in self._open and self._error is None:
            unread = self._waiting.get(item.request_id)
            joined = item if unread is None else merged((unread, item))
            self._waiting[item.request_id] = joined
            if len(joined.token_ids) > MAX_WAITING_TOKENS:
                self._end_slow_reader()
        self._arrived.set()

    def drop(self, request_id: str) -> None:
        """Abort one request, because its reader needs no more."""
        self._waiting.pop(request_id, None)
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort([request_id])

    async def aclose(self) -> None:
        """Abort every unfinished request, and discard unread outputs."""
        self._waiting.clear()
        left, self._open = sorted(self._open), set()
        self._abort(left)

    def __aiter__(self) -> TokenStream:
        """Return the stream itself; it can be read only once."""
        return self

    async def __anext__(self) -> TokenOutput:
        """Return the next output.

        Raises EngineDeadError, RequestError or SlowReaderError if the stream failed.
        """
        while self._open:
            if self._waiting:
                output = self._waiting.pop(next(iter(self._waiting)))
                if output.finish_reason is not None:
                    self._open.discard(output.request_id)
                return output
            if self._error is not None:
                await self.aclose()
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        raise StopAsyncIteration

    def _end_slow_reader(self) -> None:
        """Abort all requests now: the reader may never read again."""
        self._waiting.clear()
        self._error = SlowReaderError(
            f"over {MAX_WAITING_TOKENS} tokens of the output are unread: read faster"
        )
        self._abort(sorted(self._open))
