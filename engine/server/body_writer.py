"""Write the body of a stream, past the layers that each of its many events would pass otherwise.

Kiln's middleware changes only the start of a response, and to frame a part of the body takes one
line. So a connection offers each request a writer of its own. Behind any other server, and for
HTTP/1.0, the body goes through ASGI's ``send``.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.types import Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

_EXTENSION = "kiln.body"  # of a request's scope


class BodyWriter(Protocol):
    """Writes the body of one response, between its start and its end."""

    def write(self, data: bytes) -> bool:
        """Write data, not empty; return whether to await ``drain`` before the next."""

    async def drain(self) -> None:
        """Wait until the client has read enough."""


class ConnectionWriter:
    """Writes chunks to a connection of uvicorn's, as HTTP/1.1 frames them.

    Source: RFC 9112, section 7.1.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    def write(self, data: bytes) -> bool:
        """Write a chunk."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self._flow.write_paused

    async def drain(self) -> None:
        """Wait until the send buffer is below its low-water mark, or the connection is lost."""
        await self._flow.drain()


class SendWriter:
    """Writes through ASGI."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._data = b""

    def write(self, data: bytes) -> bool:
        """Keep data for ``drain``."""
        self._data += data
        return True

    async def drain(self) -> None:
        """Send it; this waits for a slow client."""
        data, self._data = self._data, b""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


class CountingWriter:
    """Counts the bytes that go to another writer."""

    def __init__(self, writer: BodyWriter) -> None:
        self._writer = writer
        self.size = 0

    def write(self, data: bytes) -> bool:
        """Count data and write it."""
        self.size += len(data)
        return self._writer.write(data)

    async def drain(self) -> None:
        """Wait as the other writer does."""
        await self._writer.drain()


def offer_writer(scope: Scope, writer: BodyWriter) -> None:
    """Let the response to a request use a writer."""
    scope.setdefault("extensions", {})[_EXTENSION] = writer


def counted_writer(scope: Scope) -> CountingWriter | None:
    """Count what a response writes past ASGI's ``send``; None if the connection has no writer."""
    offered: BodyWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    if offered is None:
        return None
    writer = CountingWriter(offered)
    offer_writer(scope, writer)
    return writer


def body_writer(scope: Scope, send: Send) -> BodyWriter:
    """Return the writer that the connection offers, or one through ``send``."""
    offered: BodyWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    return SendWriter(send) if offered is None else offered
