"""How an API formats its responses: the bytes of a stream's events, and whole bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kiln.engine.server.errors import ApiError
from kiln.engine.server.responses import Answer, Chunk
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
