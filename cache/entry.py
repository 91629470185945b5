"""One entry of the kernel cache as bytes that prove themselves.

    magic · u32 header length · header JSON, spaces to a multiple of 64 · payload · SHA-256

The digest covers every byte before it, so one pass over the data finds any flip, truncation or
swapped part. The header names key and target, so an entry cannot pass for another.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAGIC = b"KILNKC2\n"
ALIGNMENT = 64  # bytes: where the payload starts, so that a mapped cubin is aligned
DIGEST_SIZE = 32
_LENGTH = struct.Struct("<I")
_START = len(MAGIC) + _LENGTH.size


class EntryError(ValueError):
    """The bytes are not a whole entry of this key and target; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A verified entry: what went into it, and its payload."""

    header: Mapping[str, Any]
    payload: bytes


def encode(key: str, payload: bytes, header: Mapping[str, Any]) -> bytes:
    """Return an entry as bytes; the same arguments give the same bytes.

    ``header`` is anything JSON can say; ``key`` and ``size`` (bytes of payload) are added to it.
    """
    stated = {**header, "key": key, "size": len(payload)}
    text = json.dumps(stated, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(_START + len(text)) % ALIGNMENT)
    body = b"".join((MAGIC, _LENGTH.pack(len(text)), text, payload))
    return body + hashlib.sha256(body).digest()


def decode(data: bytes, key: str, arch: str | None = None) -> Entry:
    """Return the entry of a key, and of a target where one is given. Raises EntryError."""
    if not data.startswith(MAGIC):
        raise EntryError("not an entry, or of another version")
    if len(data) < _START + DIGEST_SIZE:
        raise EntryError(f"truncated to {len(data)} bytes")
    body = memoryview(data)[:-DIGEST_SIZE]
    if hashlib.sha256(body).digest() != data[-DIGEST_SIZE:]:
        raise EntryError("truncated or damaged: its SHA-256 does not fit")
    # From here on the bytes are as somebody wrote them; whether for this key is still open.
    header = header_of(data)
    for name, want in (("key", key), ("arch", arch)):
        if want is not None and header.get(name) != want:
            raise EntryError(f"its {name} is {header.get(name)!r}, want {want!r}")
    return Entry(header, data[-DIGEST_SIZE - header["size"] : -DIGEST_SIZE])


def header_of(data: bytes) -> dict[str, Any]:
    """Return what an entry says of itself, unverified. Raises EntryError where it cannot be so."""
    start = _START + int(_LENGTH.unpack_from(data, len(MAGIC))[0])
    try:
        header = json.loads(str(data[_START:start], "utf-8"))
    except (ValueError, RecursionError):
        raise EntryError("its header is not JSON") from None
    size = len(data) - DIGEST_SIZE - start
    if not isinstance(header, dict) or header.get("size") != size:
        raise EntryError("its header does not fit its payload")
    header["size"] = size  # JSON may have said it as a float
    return header
