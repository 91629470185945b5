"""Clients that read streams as cheaply as they can: they count events, and parse none."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

_EVENT, _DONE = b"data: ", b"data: [DONE]"
_SMALL = 4096  # bytes that the kernel keeps for a client that does not read
_SETTLE = 0.5  # seconds for the requests to begin


@dataclass(slots=True, order=True)
class Read:
    """What one reader got: the number of its events, and the times at which bytes arrived."""

    events: int = 0
    times: list[float] = field(default_factory=list)
    status: bytes = b""
    is_complete: bool = False


@dataclass(slots=True)
class _Reader(asyncio.Protocol):
    request: bytes
    done: asyncio.Future[None]
    read: Read = field(default_factory=Read)
    _end: bytes = b""
    _transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.read.times.append(time.perf_counter())
        if not self.read.status:
            self.read.status = data[:15]
        known = self._end + data
        self.read.events += known.count(_EVENT) - self._end.count(_EVENT)
        self._end = known[-len(_DONE) - 8 :]
        if _DONE in known[-len(_DONE) - 64 :]:
            self.read.is_complete = self.read.status == b"HTTP/1.1 200 OK"
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def read_streams(
    address: tuple[str, int], path: str, bodies: list[dict[str, Any]]
) -> list[Read]:
    """Send all bodies at once, each on a connection of its own, and read to the end."""
    loop = asyncio.get_running_loop()
    readers = [_Reader(_request(path, body), loop.create_future()) for body in bodies]
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, *address)  # type: ignore[misc]
    await asyncio.gather(*(reader.done for reader in readers))
    return [reader.read for reader in readers]


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@asynccontextmanager
async def hostile_clients(
    address: tuple[str, int], silent: int, path: str, bodies: list[dict[str, Any]]
) -> AsyncIterator[None]:
    """Keep open sockets that send nothing, and streams of ``bodies`` that nobody reads."""
    with ExitStack() as stack:
        for _ in range(silent):
            stack.enter_context(socket.create_connection(address))
        for body in bodies:
            stalled = stack.enter_context(socket.socket())
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
            stalled.connect(address)
            stalled.sendall(_request(path, body))
        await asyncio.sleep(_SETTLE)
        yield
