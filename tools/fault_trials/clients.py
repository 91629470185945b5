"""Clients that send one request after the other, and note how each one ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_AGAIN_SECONDS = 0.1  # before the next request after one that was refused
PATH = "/v1/completions"


@dataclass(slots=True)
class Answer:
    """How a request ended: its status, and whether the answer is whole or says that it failed."""

    status: int
    is_whole: bool = False
    error: str = ""  # the code of the error, in the body or in the last event

    @property
    def outcome(self) -> str:
        """One word: ``finished``, the code of an error, or ``cut off`` without any."""
        return self.error or ("finished" if self.is_whole and self.status == 200 else "cut off")


class Connection:
    """A connection of HTTP/1.1 that is kept for several requests, and opened when needed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.has_begun = asyncio.Event()  # the answer to the request under way

    async def ask(self, body: dict[str, Any], path: str = PATH) -> Answer:
        """Send a request, and read its answer to the end, whether it comes in chunks or at once."""
        self.has_begun.clear()
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(*self._address)
            reader, writer = self._streams
            writer.write(request_bytes(body, path))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            self.has_begun.set()
            status, _, size = int(head[9:12]), *head.partition(b"content-length: ")[1:]
            if size:
                content = await reader.readexactly(int(size.split(b"\r\n", 1)[0]))
                error = json.loads(content).get("error") or {}
                answer = Answer(status, is_whole=True, error=error.get("code") or "")
            else:
                answer = await _read_events(reader, status)
            if b"connection: close" in head:
                self.close()
            return answer
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return Answer(0)

    def close(self) -> None:
        """Close the connection, also in the middle of an answer."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _read_events(reader: asyncio.StreamReader, status: int) -> Answer:
    """Read a chunked stream of events; only the last two of them matter."""
    last = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        last = (last + (await reader.readexactly(size + 2))[:-2])[-4096:]
    await reader.readexactly(2)
    events = last.split(b"data: ")
    error = ""
    if len(events) > 2 and events[-2].startswith(b'{"error"'):
        error = json.loads(events[-2])["error"]["code"]
    return Answer(status, events[-1].strip() == b"[DONE]", error)


def request_bytes(body: dict[str, Any], path: str = PATH) -> bytes:
    """Return a request as it is sent."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@dataclass(slots=True)
class Client:
    """Sends a body over and over. ``ended`` is set when the request under way ends."""

    connection: Connection
    body: dict[str, Any]
    outcomes: Counter[str] = field(default_factory=Counter)
    in_flight: bool = False
    last: str = ""
    last_time: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Send requests until cancelled."""
        while True:
            self.in_flight = True
            answer = await self.connection.ask(self.body)
            self.in_flight = False
            self.last, self.last_time = answer.outcome, time.monotonic()
            self.outcomes[self.last] += 1
            self.ended.set()
            if answer.status != 200:
                await asyncio.sleep(_AGAIN_SECONDS)


class Clients:
    """Some clients that run in the background of an ``async with`` block."""

    def __init__(self, address: tuple[str, int], bodies: list[dict[str, Any]]) -> None:
        self.all = [Client(Connection(address), body) for body in bodies]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Clients:
        """Start them."""
        self._tasks = [asyncio.create_task(client.run()) for client in self.all]
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self.all:
            client.connection.close()
        await asyncio.sleep(0.1)  # the loop closes the sockets: the server need not drain for them

    @property
    def outcomes(self) -> Counter[str]:
        """How often each outcome came."""
        return sum((client.outcomes for client in self.all), Counter())

    async def wait_all_busy(self, seconds: float) -> None:
        """Wait until each has a request in flight whose stream has begun."""
        async with asyncio.timeout(seconds):
            for client in self.all:
                while not (client.in_flight and _has_begun(client)):
                    await asyncio.sleep(0.01)


def _has_begun(client: Client) -> bool:
    return not client.body.get("stream") or client.connection.has_begun.is_set()


async def wait_ended(clients: list[Client], seconds: float) -> None:
    """Wait until the request of each has ended; one that does not, is left."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for client in clients:
                await client.ended.wait()
