"""What travels between the front and a replica."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kiln_affinity import digests, read_prompt
from starlette.requests import Request

MAX_BODY_BYTES = 4 * 2**20  # Kiln's limit, kept here so that no longer body is held in memory
Headers = tuple[tuple[bytes, bytes], ...]

# These describe one connection, not the message (RFC 9110, 7.6.1); each side writes its own.
_OF_THE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"date")
)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request.

    ``chain`` is what ``kiln_affinity.digests`` says about its prompt. ``tried``: ids of the
    replicas that could not pass it on to an engine.
    """

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    adapter: str = ""
    chain: tuple[bytes, ...] = ()
    tried: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Head:
    """The first item of an answer; the bytes of its body follow."""

    status: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class NotServed:
    """The only item of an attempt that reached no engine, so that another replica may be tried.

    ``reason`` is "refused" (no connection to the server) or the code of the server's error.
    """

    replica: str
    reason: str


async def read_call(request: Request, served_names: Collection[str]) -> Call:
    """Return a request with what routing needs to know."""
    body = await request.body()
    adapter, pieces = read_prompt(body, served_names) if body else ("", [])
    target = request.scope["raw_path"].decode("latin-1")
    if request.scope["query_string"]:
        target += "?" + request.scope["query_string"].decode("latin-1")
    headers = passed_on(request.headers.raw, b"host", b"content-length", b"x-request-id")
    request_id = (b"x-request-id", request.state.request_id.encode())
    chain = digests(adapter, pieces)
    return Call(request.method, target, (*headers, request_id), body, adapter, chain)


def passed_on(headers: Headers | list[tuple[bytes, bytes]], *dropped: bytes) -> Headers:
    """Return the headers that a proxy passes on, without those that are named."""
    left_out = _OF_THE_CONNECTION.union(dropped)
    return tuple((name, value) for name, value in headers if name.lower() not in left_out)
