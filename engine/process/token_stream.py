"""The output stream of one or more requests, in the API process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kiln.engine.errors import KilnError, SlowReaderError
from kiln.engine.requests.request import TokenOutput, merged

MAX_WAITING_TOKENS = 1024  # of one request: seconds of unread output

Take = Callable[[TokenOutput], bool]  # whether the reader wants to pause


class TokenStream:
    """Passes on the outputs of its requests as they arrive, or iterates over them.

    Unread outputs of a request are merged, so at most one per request is queued. The stream ends
    when each request has finished or was dropped. Closing it, as by ``contextlib.aclosing``, aborts
    unfinished requests. An error put into it is raised to its reader. A reader that falls too far
    behind gets SlowReaderError, and its requests are aborted.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._open = set(request_ids)
        self._abort = abort
        self._waiting: dict[str, TokenOutput] = {}  # by request
        self._error: KilnError | None = None
        self._take: Take | None = None  # while a reader waits in ``feed``
        self._fed: asyncio.Future[bool]

    def put(self, item: TokenOutput | KilnError) -> None:
        """Give the reader a message of the engine."""
        self.queue(item)
        self.wake()

    def queue(self, item: TokenOutput | KilnError) -> None:
        """Queue a message of the engine for the reader; ``wake`` lets it read."""
        if isinstance(item, KilnError):
            self._error = self._error or item
        elif item.request_id in self._open and self._error is None:
            unread = self._waiting.get(item.request_id)
            joined = item if unread is None else merged((unread, item))
            self._waiting[item.request_id] = joined
            if len(joined.token_ids) > MAX_WAITING_TOKENS:
                self._end_slow_reader()

    @property
    def has_waiting(self) -> bool:
        """Whether the next output is there already."""
        return bool(self._waiting)

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

    async def feed(self, take: Take) -> bool:
        """Call ``take`` with each output, inside the call of ``wake`` that brings it.

        So no task is woken for a token: a step brings one to each of many streams. Returns true as
        soon as ``take`` does, and false at the end of the stream. Raises what ``take`` raises; and
        EngineDeadError, RequestError or SlowReaderError if the stream failed.
        """
        self._take, self._fed = take, asyncio.get_running_loop().create_future()
        try:
            self.wake()
            return await self._fed
        except KilnError:
            await self.aclose()
            raise
        finally:
            self._take = None

    def wake(self) -> None:
        """Pass what is queued to the reader, if it waits."""
        if self._take is None or self._fed.done():
            return
        try:
            while self._waiting:
                output = self._waiting.pop(next(iter(self._waiting)))
                if output.finish_reason is not None:
                    self._open.discard(output.request_id)
                if self._take(output):
                    self._fed.set_result(True)
                    return
            if not self._open:
                self._fed.set_result(False)
            elif self._error is not None:
                self._fed.set_exception(self._error)
        except Exception as error:
            self._fed.set_exception(error)

    def __aiter__(self) -> TokenStream:
        """Return the stream itself; it can be read only once."""
        return self

    async def __anext__(self) -> TokenOutput:
        """Return the next output. Raises what ``feed`` does."""
        outputs: list[TokenOutput] = []

        def take(output: TokenOutput) -> bool:
            outputs.append(output)
            return True

        if not await self.feed(take):
            raise StopAsyncIteration
        return outputs[0]

    def _end_slow_reader(self) -> None:
        """Abort all requests now: the reader may never read again."""
        self._waiting.clear()
        self._error = SlowReaderError(
            f"over {MAX_WAITING_TOKENS} tokens of the output are unread: read faster"
        )
        self._abort(sorted(self._open))
