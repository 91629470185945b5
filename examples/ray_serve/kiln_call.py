"""What travels between the front and a replica."""

from __future__ import annotations

from dataclasses import dataclass

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


def passed_on(headers: Headers | list[tuple[bytes, bytes]], *dropped: bytes) -> Headers:
    """Return the headers that a proxy passes on, without those that are named."""
    left_out = _OF_THE_CONNECTION.union(dropped)
    return tuple((name, value) for name, value in headers if name.lower() not in left_out)
