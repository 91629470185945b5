"""A load of concurrent streams, measured at the client.

Either some number of requests is always under way (a closed loop), or requests arrive at random
times, at some rate (an open loop).

The client is minimal on purpose: on a machine that also runs the server, it takes CPU time from
it. It reads one event per line, as every server writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from kiln.engine.errors import KilnError


class LoadError(KilnError):
    """A request failed, so the measurement is invalid."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent.

    ``concurrency``: the most at a time; None: no limit. ``rate``: requests per second, at the
    random times of a Poisson process; None: each as soon as the limit allows.
    """

    concurrency: int | None
    rate: float | None = None

    def times(self, count: int) -> list[float]:
        """Return the earliest times of ``count`` requests, in seconds from the start.

        They are the same in every run, and scaled to the exact rate, as vLLM's benchmark does.
        """
        if self.rate is None:
            return [0.0] * count
        draw = random.Random(0)
        times = list(accumulate(draw.expovariate(1.0) for _ in range(count)))
        return [time / times[-1] * count / self.rate for time in times]


@dataclass(slots=True)
class Measured:
    """One response: the times of the request and of each event, in seconds of one clock."""

    started: float
    events: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0


async def run_load(
    url: str, bodies: Sequence[dict[str, Any]], arrivals: Arrivals, api_key: str | None = None
) -> tuple[float, list[Measured]]:
    """Send completions and return (total seconds, each response).

    Raises LoadError if the server cannot be reached or a response is incomplete.
    """
    todo = iter(zip(bodies, arrivals.times(len(bodies)), strict=True))
    done: list[Measured] = []
    begun = time.perf_counter()

    async def work() -> None:
        for body, at in todo:
            await asyncio.sleep(begun + at - time.perf_counter())
            done.append(await _measure(url, body, api_key))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(arrivals.concurrency or len(bodies), len(bodies))):
                group.create_task(work())
    except* (OSError, EOFError) as errors:
        raise LoadError(f"the connection to {url} broke: {errors.exceptions[0]}") from errors
    except* LoadError as errors:
        raise LoadError(str(errors.exceptions[0])) from errors
    return time.perf_counter() - begun, done


async def _measure(url: str, body: dict[str, Any], api_key: str | None) -> Measured:
    """Stream one completion."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    measured = Measured(time.perf_counter())
    last = b""
    async with _connection(url, data, api_key) as reader:
        status = await reader.readline()
        if b" 200 " not in status:
            raise LoadError(f"{status.decode().strip()}: {(await reader.read(2000)).decode()}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                measured.events.append(time.perf_counter())
                last = line
    usage = json.loads(last[6:]).get("usage") if last else None
    if usage is None:
        raise LoadError(f"a response ended without its usage: {last[:300].decode()}")
    measured.events.pop()  # the usage has an event of its own
    measured.output_tokens = usage["completion_tokens"]
    measured.prompt_tokens = usage["prompt_tokens"]
    return measured


@contextlib.asynccontextmanager
async def _connection(
    url: str, data: bytes, api_key: str | None
) -> AsyncIterator[asyncio.StreamReader]:
    """Connect, send a request, and yield what is read from the server."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_tls or None)
    key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
    head = (
        f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Connection: close\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + data)
        yield reader
    finally:
        writer.close()
