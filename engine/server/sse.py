"""Server-sent events: the bytes of a stream, and the response that sends them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kiln.engine.server.body_writer import BodyWriter, body_writer
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
    return b"data: " + json_line(data) + b"\n\n"


def json_line(value: Mapping[str, Any] | str) -> bytes:
    """Return a value as JSON on one line.

    Many clients take three characters for the end of a line, although SSE does not: U+0085, U+2028
    and U+2029. In JSON they can only stand inside strings, where an escape means the same.
    """
    data = encode_json(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escape in _LINE_ENDS:
            data = data.replace(raw, escape)
    return data


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return an event whose name is the ``type`` of its data."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


class EventSource(Protocol):
    """What an ``EventStream`` sends."""

    async def write_to(self, body: BodyWriter) -> None:
        """Write all events."""

    async def aclose(self) -> None:
        """Release what the events are made from. May be repeated."""


class EventStream(Response):
    """Sends events as they arrive; a client's disconnect closes their source at once."""

    media_type = "text/event-stream"

    def __init__(self, events: EventSource) -> None:
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: else nginx buffers the events and sends them late.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            async with contextlib.aclosing(self._events):
                await unless_gone(receive, self._send_all(scope, send))
        except ClientDisconnect:
            scope.setdefault("state", {})["aborted"] = True  # for the log

    async def _send_all(self, scope: Scope, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        await self._events.write_to(body_writer(scope, send))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
