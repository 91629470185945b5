"""Content-addressed entries on disk: a reader sees a whole, verified entry or none.

An entry is one file: magic, header length, header JSON, payload, SHA-256 of all before. Anything
wrong with it (truncated, flipped, foreign-owned, another key's) makes it a miss, never an error;
trouble with the disk is one warning, never a failed request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import struct
from pathlib import Path
from typing import Any

from kiln.cache.trust import make_private_folder, open_trusted

_MAGIC = b"KILNKC1\n"
_LENGTH = struct.Struct("<I")
_DIGEST_SIZE = 32
_KEY = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class Store:
    """Map from key to payload under one root folder; ``root`` None keeps nothing."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._warned = False

    def path(self, key: str) -> Path:
        """Return where an entry of this key lives. Raises ValueError when key is not a digest."""
        if self.root is None or not _KEY.fullmatch(key):
            raise ValueError(f"no path for key {key!r} in {self.root}: want 64 hex digits")
        return self.root / "v1" / key[:2] / f"{key}.kk"

    def get(self, key: str) -> bytes | None:
        """Return the verified payload of a key, or None on a miss of any kind."""
        if self.root is None:
            return None
        path = self.path(key)
        fd = open_trusted(path)
        if fd is None:
            return None
        try:
            with os.fdopen(fd, "rb") as file:
                data = file.read()
        except OSError:
            return None
        payload = _verified_payload(data, key)
        if payload is None:
            self._quarantine(path)
        return payload

    def put(self, key: str, payload: bytes, header: dict[str, Any]) -> bool:
        """Publish an entry; return whether it is on disk now, ours or an earlier winner's.

        Written beside the target, synced, then linked into place: the first writer wins, and an
        entry that somebody may have open is never replaced. Never raises OSError.
        """
        if self.root is None:
            return False
        path = self.path(key)
        try:
            for folder in (self.root, self.root / "v1", path.parent):
                if not make_private_folder(folder):
                    self._warn(f"{folder} cannot be made, or others can write it")
                    return False
            _publish(path, _encode(key, payload, header))
        except OSError as error:
            self._warn(str(error))
            return False
        return True

    def _quarantine(self, path: Path) -> None:
        """Move a bad entry aside, so that the next build can publish in its place."""
        log.warning("kernel cache: %s is damaged; it will be built again", path)
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(".bad"))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("kernel cache: not saving kernels to disk: %s", reason)


def _encode(key: str, payload: bytes, header: dict[str, Any]) -> bytes:
    meta = json.dumps({**header, "key": key, "size": len(payload)}, sort_keys=True).encode()
    body = _MAGIC + _LENGTH.pack(len(meta)) + meta + payload
    return body + hashlib.sha256(body).digest()


def _verified_payload(data: bytes, key: str) -> bytes | None:
    start = len(_MAGIC) + _LENGTH.size
    if len(data) < start + _DIGEST_SIZE or not data.startswith(_MAGIC):
        return None
    if hashlib.sha256(data[:-_DIGEST_SIZE]).digest() != data[-_DIGEST_SIZE:]:
        return None
    end = start + int(_LENGTH.unpack_from(data, len(_MAGIC))[0])
    try:
        header = json.loads(data[start:end])
    except ValueError:
        return None
    if not isinstance(header, dict) or header.get("key") != key:  # an entry of another name
        return None
    return data[end:-_DIGEST_SIZE]


def _publish(path: Path, data: bytes) -> None:
    temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(16)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # somebody else published the same content first
        except OSError:  # a file system without hard links
            os.rename(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
