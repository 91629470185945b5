"""A load of concurrent streams, measured at the client.

The client is minimal on purpose: on a machine that also runs the server, it takes CPU time from it.
Requests are encoded before the first is sent. While a response arrives, its events are counted in
the bytes and given a time, and only its last bytes are parsed, when it has ended.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kiln.engine.bench.arrivals import Arrivals
from kiln.engine.errors import KilnError

# In JSON a line break is escaped, so that no text of a model looks like the begin of an event.
_EVENT = b"\ndata: {"
_END = b"\ndata: [DONE]"
_KEPT = 2048  # bytes of the end of a response, which has its usage or its error
_BUFFER = 1 << 16
_PATIENCE = 6 * 3600.0  # seconds until a request without an end has failed, as in vLLM's benchmark
_OTHER_FILES = 64  # that this process has open
_SHOWN = 300  # characters of a server's error


class LoadError(KilnError):
    """No request got an answer, so there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the route that is measured. ``is_chat``: chat completions."""

    url: str
    model: str | None = None
    api_key: str | None = None
    is_chat: bool = False

    @property
    def path(self) -> str:
        """The path of the route."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


@dataclass(slots=True)
class Measured:
    """One response: the times of the request and of each event with tokens, of one clock.

    ``error``: why it failed, else empty. The number of output tokens is the server's.
    """

    started: float = 0.0
    events: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


def run_load(
    target: Target,
    bodies: Sequence[Mapping[str, Any]],
    arrivals: Arrivals,
    advance: Callable[[], None] = lambda: None,
) -> tuple[float, list[Measured]]:
    """Send requests and return (total seconds, each response in the order of the requests).

    ``advance`` is called at the end of each. A request that fails does not end the others.
    """
    parts = urlsplit(target.url)
    requests = [_request(parts, target, body) for body in bodies]
    _allow_files(_OTHER_FILES + min(arrivals.concurrency or len(bodies), len(bodies)))
    return asyncio.run(_run(parts, target, requests, arrivals, advance))


def _allow_files(count: int) -> None:
    """Raise the limit of open files, of which each connection is one, as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


async def _run(
    parts: SplitResult,
    target: Target,
    requests: Sequence[bytes],
    arrivals: Arrivals,
    advance: Callable[[], None],
) -> tuple[float, list[Measured]]:
    answers = [Measured() for _ in requests]
    todo = iter(zip(requests, arrivals.times(len(requests)), answers, strict=True))
    buffer = bytearray(_BUFFER)  # of all connections: each is read from at once
    begun = time.perf_counter()

    async def work(todo: Iterator[tuple[bytes, float, Measured]]) -> None:
        for request, at, answer in todo:
            if (wait := begun + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            await _measure(parts, request, answer, buffer, is_chat=target.is_chat)
            advance()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(arrivals.concurrency or len(requests), len(requests))):
            group.create_task(work(todo))
    return time.perf_counter() - begun, answers


async def _measure(
    parts: SplitResult, request: bytes, answer: Measured, buffer: bytearray, *, is_chat: bool
) -> None:
    """Send a request, and write what came back into ``answer``."""
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    loop = asyncio.get_running_loop()
    stream = _Stream(buffer, loop.create_future(), answer.events)
    answer.started = time.perf_counter()
    try:
        async with asyncio.timeout(_PATIENCE):
            transport, _ = await loop.create_connection(
                lambda: stream, parts.hostname or "", port, ssl=is_tls or None
            )
            try:
                transport.write(request)
                await stream.ended
            finally:
                transport.abort()
    except TimeoutError:
        answer.error = f"no end of the answer after {_PATIENCE:.0f} s"
    except OSError as error:
        answer.error = f"{type(error).__name__}: {error}"
    else:
        stream.finish(answer, is_chat=is_chat)


class _Stream(asyncio.BufferedProtocol):
    """The bytes of one response, whose events get the time at which they are read."""

    def __init__(self, buffer: bytearray, ended: asyncio.Future[None], times: list[float]) -> None:
        self.ended = ended
        self._buffer, self._view, self._times = buffer, memoryview(buffer), times
        self._head = b""  # up to the end of the first event
        self._last = b"\n"

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of all connections; its bytes are read at once."""
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """Count the events of new bytes, and keep the last ones."""
        now = time.perf_counter()
        before = len(self._last)
        joined = self._last + self._buffer[:nbytes]
        seen = max(0, before - len(_EVENT) + 1)
        events = joined.count(_EVENT, seen)
        if not self._times:
            self._head += joined[before:]
        if events == 1:
            self._times.append(now)
        elif events:
            self._times += [now] * events
        self._last = joined[-_KEPT:] if len(joined) > 2 * _KEPT else joined
        if joined.find(_END, max(0, before - len(_END) + 1)) >= 0:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response: a server may leave [DONE] out."""
        self._end(exc)

    def eof_received(self) -> bool | None:
        """Let the connection be closed."""
        return None

    def _end(self, exc: Exception | None = None) -> None:
        if self.ended.done():
            return
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)

    def finish(self, answer: Measured, *, is_chat: bool) -> None:
        """Read the counts of tokens, or the error."""
        last = self._last[self._last.rfind(_EVENT) + 7 :] if answer.events else b""
        event = _json(last.partition(b"\n")[0])
        usage = event.get("usage")
        if not isinstance(usage, dict):
            answer.error = self._error(event)
            return
        if not event.get("choices"):
            answer.events.pop()  # the usage has an event of its own
        if is_chat and answer.events and not _has_text(self._head):
            answer.events.pop(0)  # the first event of a chat has only the role
        answer.output_tokens = _number(usage.get("completion_tokens"))
        answer.prompt_tokens = _number(usage.get("prompt_tokens"))

    def _error(self, event: Mapping[str, Any]) -> str:
        status, _, rest = self._head.partition(b"\r\n")
        if not status:
            return "the connection was closed before an answer"
        said = event.get("error")
        if said is None and b" 200 " not in status:
            body = rest.partition(b"\r\n\r\n")[2]
            told = _json(body[body.find(b"{") : body.rfind(b"}") + 1]).get("error")
            message = told.get("message") if isinstance(told, dict) else told
            text = message or " ".join(body.decode(errors="replace").split())
            return f"{status.decode(errors='replace')}: {text}"[:_SHOWN]
        message = said.get("message", said) if isinstance(said, dict) else said
        if message is not None:
            return f"an error in the stream: {message}"[:_SHOWN]
        return "the answer ended without its usage" if event else "the connection was closed early"


def _has_text(head: bytes) -> bool:
    """Whether the first event of a chat has a part of the answer."""
    event = _json(head.partition(_EVENT[:-1])[2].partition(b"\n")[0])
    try:
        delta = event["choices"][0]["delta"]
        return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content"))
    except (KeyError, IndexError, TypeError, AttributeError):
        return False


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _request(parts: SplitResult, target: Target, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request for a streamed answer."""
    model = {} if target.model is None else {"model": target.model}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps({**model, **body, **streamed}).encode()
    key = "" if target.api_key is None else f"Authorization: Bearer {target.api_key}\r\n"
    head = (
        f"POST {parts.path}{target.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Connection: close\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
