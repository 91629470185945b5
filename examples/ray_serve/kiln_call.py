"""What travels between the front and a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from kiln_affinity import digests, read_prompt
from starlette.requests import Request

from kiln.engine.server.errors import ApiError

MAX_BODY_BYTES = 4 * 2**20  # Kiln's limit, kept here so that no longer body is held in memory
Headers = tuple[tuple[bytes, bytes], ...]

# These describe one connection, not the message (RFC 9110, 7.6.1); each side writes its own.
_OF_THE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"date")
)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. ``chain`` is what ``kiln_affinity.digests`` says about its prompt."""

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    adapter: str = ""
    chain: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """The first item of an answer; the bytes of its body follow."""

    status: int
    headers: Headers


async def read_call(request: Request, served_names: Collection[str]) -> Call:
    """Return a request with what routing needs to know. Raises ApiError 413."""
    body = bytearray()
    async with contextlib.aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less")
    adapter, pieces = read_prompt(bytes(body), served_names) if body else ("", [])
    target = request.scope["raw_path"].decode("latin-1")
    if request.scope["query_string"]:
        target += "?" + request.scope["query_string"].decode("latin-1")
    headers = passed_on(request.headers.raw, b"host", b"content-length")
    chain = digests(adapter, pieces)
    return Call(request.method, target, headers, bytes(body), adapter, chain)


def passed_on(headers: Headers | list[tuple[bytes, bytes]], *dropped: bytes) -> Headers:
    """Return the headers that a proxy passes on, without those that are named."""
    left_out = _OF_THE_CONNECTION.union(dropped)
    return tuple((name, value) for name, value in headers if name.lower() not in left_out)
