"""How an API formats its responses: the bytes of a stream's events, and whole bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kiln.engine.server.errors import ApiError
from kiln.engine.server.responses import Answer, Chunk
from kiln.engine.server.sse import DONE, event
from kiln.engine.text.outputs import CompletionDelta


class EventForm(Protocol):
    """How one API formats its responses. Methods of streams return bytes, empty for no event."""

    def opening(self) -> bytes:
        """Return the first events of a stream."""

    def chunk(self, index: int, delta: CompletionDelta) -> bytes:
        """Return the events of a delta of output ``index``."""

    def closing(self) -> bytes:
        """Return the last events of a stream that is complete."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""

    def answer(self) -> Mapping[str, Any]:
        """Return the complete response body."""


class Form(Protocol):
    """How chat completions or completions are formatted: in chunks of one shape."""

    def opening(self) -> Sequence[Chunk]:
        """Return the first chunks of a stream."""

    def chunk(self, index: int, delta: CompletionDelta) -> Chunk | None:
        """Return the chunk of a delta of output ``index``; None if it says nothing yet."""

    def usage_chunk(self) -> Chunk:
        """Return the last chunk of a stream, with the token counts and no choices."""

    def answer(self) -> Answer:
        """Return the complete response body."""


class ChunkEvents:
    """A stream of chunks that ends with [DONE]. ``include_usage``: the last one has the counts."""

    def __init__(self, form: Form, include_usage: bool) -> None:
        self._form = form
        self._include_usage = include_usage

    def opening(self) -> bytes:
        """Return the first events of a stream."""
        return b"".join(event(chunk) for chunk in self._form.opening())

    def chunk(self, index: int, delta: CompletionDelta) -> bytes:
        """Return the event of a delta, empty if it says nothing yet."""
        chunk = self._form.chunk(index, delta)
        return b"" if chunk is None else event(chunk)

    def closing(self) -> bytes:
        """Return the last events of a stream that is complete."""
        usage = event(self._form.usage_chunk()) if self._include_usage else b""
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        return event(error.envelope()) + DONE

    def answer(self) -> Answer:
        """Return the complete response body."""
        return self._form.answer()
