"""Server-sent events: the bytes of a stream, and the response that sends them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.responses import encode_json

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = (
    (b"\xc2\x85", rb"\u0085"),
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
)


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + _one_line(encode_json(data)) + b"\n\n"


def _one_line(data: bytes) -> bytes:
    """Escape the characters that many clients take for the end of a line, although SSE does not.

    These are U+0085, U+2028 and U+2029. In JSON they can only stand inside strings, where an
    escape means the same character.
    """
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escape in _LINE_ENDS:
            data = data.replace(raw, escape)
    return data


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return an event whose name is the ``type`` of its data."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


class EventStream(StreamingResponse):
    """Sends events as they arrive; a client's disconnect closes their source at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # X-Accel-Buffering: else nginx buffers the events and sends them late.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientDisconnect:
            scope.setdefault("state", {})["aborted"] = True  # for the log

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await self.stream_response(send)
