"""Content keys: unambiguous hashes of everything that went into a build."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

KEY_SCHEMA = b"1"  # increase it when the meaning of a field changes


def content_key(fields: Iterable[tuple[str, bytes]]) -> str:
    """Return the hex SHA-256 of labelled fields, in order.

    Label and value are hashed with their lengths, so ("a", "bc") and ("ab", "c") differ.
    """
    digest = hashlib.sha256()
    for label, value in (("schema", KEY_SCHEMA), *fields):
        for part in (label.encode(), value):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


def digest_of(data: bytes) -> bytes:
    """Return the SHA-256 of bytes, for use as a field of a key."""
    return hashlib.sha256(data).digest()
