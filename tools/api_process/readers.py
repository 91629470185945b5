"""Clients that read streams as cheaply as they can: they count events, and parse none."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

_EVENT, _DONE = b"data: ", b"data: [DONE]"


@dataclass(slots=True, order=True)
class Read:
    """What one reader got: the number of its events, and the times of its first and last bytes."""

    events: int = 0
    first: float = 0.0
    last: float = 0.0
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
        self.read.last = time.perf_counter()
        if not self.read.status:
            self.read.status, self.read.first = data[:15], self.read.last
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
    readers = []
    for body in bodies:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        reader = _Reader(head.encode() + data, loop.create_future())
        readers.append(reader)
        await loop.create_connection(lambda reader=reader: reader, *address)
    await asyncio.gather(*(reader.done for reader in readers))
    return [reader.read for reader in readers]
