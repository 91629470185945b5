"""The binary format of one kernel cache entry, with its own checksum.

    magic · u32 header length · u32 payload length · key · target, zeros to 64 bytes in all
    header JSON, spaces to a multiple of 64 · payload · SHA-256

The digest covers all bytes before it, so one pass detects any bit flip, truncation or swapped part.
The head holds key and target, so an entry cannot be mistaken for another. They are compared as
bytes, so a reader that needs only the payload parses no JSON.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAGIC = b"KILNKC3\n"
ALIGNMENT = 64  # bytes: where the payload starts, so that a mapped cubin is aligned
DIGEST_SIZE = 32
HEAD = struct.Struct("<8sII32s16s")  # magic, length of the header and of the payload, key, target
_MAX_ARCH = 16


class EntryError(ValueError):
    """The bytes are not a complete entry for this key and target; the message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A verified entry: its payload, and its header as JSON text."""

    text: bytes
    payload: bytes

    @classmethod
    def of(cls, header: Mapping[str, Any], payload: bytes) -> Entry:
        """Return an entry; the header may hold any JSON value."""
        return cls(_text_of(header), payload)

    @property
    def header(self) -> dict[str, Any]:
        """The header; empty if it is not a JSON object."""
        return _header_in(self.text)


def encode(key: str, arch: str, entry: Entry) -> bytes:
    """Return an entry as bytes; the same arguments give the same bytes.

    Raises ValueError if the key is malformed or the target is too long.
    """
    name = arch.encode()
    if len(name) > _MAX_ARCH or name.endswith(b"\0"):
        raise ValueError(f"target {arch!r}: an entry holds at most {_MAX_ARCH} bytes")
    text = entry.text + b" " * (-len(entry.text) % ALIGNMENT)
    head = HEAD.pack(MAGIC, len(text), len(entry.payload), _key_bytes(key), name)
    body = b"".join((head, text, entry.payload))
    return body + hashlib.sha256(body).digest()


def decode(data: bytes, key: str, arch: str) -> Entry:
    """Return the entry of a key and target. Raises EntryError."""
    if not data.startswith(MAGIC):
        raise EntryError("not an entry, or an entry of another version")
    if len(data) < HEAD.size + DIGEST_SIZE:
        raise EntryError(f"truncated to {len(data)} bytes")
    if hashlib.sha256(memoryview(data)[:-DIGEST_SIZE]).digest() != data[-DIGEST_SIZE:]:
        raise EntryError("truncated or damaged: its SHA-256 does not match")
    # The bytes are intact; now check that they belong to this key and target.
    _, length, size, own_key, own_arch = HEAD.unpack_from(data)
    start = HEAD.size + length
    if start + size + DIGEST_SIZE != len(data):
        raise EntryError("its lengths do not add up")
    if own_key != _key_bytes(key):
        raise EntryError(f"its key is {own_key.hex()}, want {key}")
    own = own_arch.rstrip(b"\0").decode(errors="replace")
    if own != arch:
        raise EntryError(f"its arch is {own!r}, want {arch!r}")
    return Entry(data[HEAD.size : start], data[start:-DIGEST_SIZE])


def header_of(data: bytes) -> dict[str, Any]:
    """Return the unverified header of an entry; empty if it cannot be read."""
    if len(data) < HEAD.size:
        return {}
    return _header_in(data[HEAD.size : HEAD.size + HEAD.unpack_from(data)[1]])


def _text_of(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _header_in(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _key_bytes(key: str) -> bytes:
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_SIZE:
        raise ValueError(f"key {key!r}: want 64 hex digits")
    return digest
