"""A closed-loop load of concurrent streams, measured at the client.

It is minimal on purpose: on a machine that also runs the server, the client takes CPU time from
it. It reads one event per line, as every server writes them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kiln.engine.errors import KilnError


class LoadError(KilnError):
    """A request failed, so the measurement is invalid."""


@dataclass(slots=True)
class Measured:
    """One response: the times of the request and of each event, in seconds of one clock."""

    started: float
    events: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0


async def run_load(
    url: str, bodies: Sequence[dict[str, Any]], concurrency: int
) -> tuple[float, list[Measured]]:
    """Send completions, ``concurrency`` at a time, and return (total seconds, each response).

    Raises LoadError if the server cannot be reached or a response is incomplete.
    """
    todo = iter(bodies)
    done: list[Measured] = []

    async def work() -> None:
        for body in todo:
            done.append(await _measure(url, body))

    begun = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except* (OSError, EOFError) as errors:
        raise LoadError(f"the connection to {url} broke: {errors.exceptions[0]}") from errors
    except* LoadError as errors:
        raise LoadError(str(errors.exceptions[0])) from errors
    return time.perf_counter() - begun, done


async def _measure(url: str, body: dict[str, Any]) -> Measured:
    """Stream one completion."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    measured = Measured(time.perf_counter())
    last = b""
    try:
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise LoadError(f"{status.decode().strip()}: {(await reader.read(2000)).decode()}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                measured.events.append(time.perf_counter())
                last = line
    finally:
        writer.close()
    usage = json.loads(last[6:]).get("usage") if last else None
    if usage is None:
        raise LoadError(f"a response ended without its usage: {last[:300].decode()}")
    measured.events.pop()  # the usage has an event of its own
    measured.output_tokens = usage["completion_tokens"]
    measured.prompt_tokens = usage["prompt_tokens"]
    return measured
