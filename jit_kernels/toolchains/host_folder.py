"""The folder of built host libraries, which this process loads and runs.

A library is published by an atomic rename. It is loaded only if the folder and the file belong to
this user and no other user can write them. Both checks use open descriptors, and the loader opens
the file through the checked folder descriptor. A library's mtime is its last use. A process that
publishes a library first removes those that were unused for long.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import secrets
import stat
import tempfile
import time
from functools import cache
from pathlib import Path

from kiln.cache.disk.trust import make_private_folder, open_trusted

_DIGEST_SIZE = 32
_KEEP_SECONDS = 14 * 86400.0
_KEEP_BYTES = 1 << 30
_TOUCH = 600.0  # seconds between two updates of the mtime
_IN_USE = 3600.0  # seconds after its last use for which a library is kept; others may load it

log = logging.getLogger(__name__)


class LibraryFolder:
    """Libraries by key, in a folder of mode 0700 that stays open until the process exits."""

    def __init__(self, path: Path, keep: object = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        info = os.fstat(self._descriptor)
        if info.st_uid not in (os.geteuid(), 0) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.close(self._descriptor)
            raise PermissionError(f"{path} belongs to another user, or other users can write to it")
        self._keep = keep
        self._pruned = False

    def holds(self, key: str) -> bool:
        """Return whether the folder has a complete and trusted library of this key."""
        fd = open_trusted(self._inside(f"{key}.so"))
        if fd is None:
            return False
        with os.fdopen(fd, "rb") as file:
            data = file.read()
            if abs(time.time() - os.fstat(fd).st_mtime) > _TOUCH:
                with contextlib.suppress(OSError):
                    os.utime(fd)
        return data[-_DIGEST_SIZE:] == _seal(key, data[:-_DIGEST_SIZE])

    def publish(self, key: str, library: bytes) -> None:
        """Write a library and publish it by an atomic rename. Raises OSError.

        A digest is appended after the library's bytes, where the loader does not read. A damaged or
        foreign file of the same name is replaced; a process that has it open keeps the old file.
        The first call of a process prunes the folder.
        """
        if not self._pruned:
            self._pruned = True
            self.prune()
        temporary = self._inside(f".tmp-{os.getpid()}-{secrets.token_hex(8)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(library + _seal(key, library))
            os.replace(temporary, self._inside(f"{key}.so"))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def load(self, key: str, mode: int) -> ctypes.CDLL:
        """Load a library after ``holds`` has verified it. Raises OSError."""
        return ctypes.CDLL(str(self._inside(f"{key}.so")), mode)

    def prune(self, max_bytes: int = _KEEP_BYTES, max_seconds: float = _KEEP_SECONDS) -> None:
        """Remove libraries unused for ``max_seconds``, then the oldest that exceed ``max_bytes``.

        Libraries used within the last hour are kept, because other processes may be loading them.
        Raises OSError.
        """
        now, kept = time.time(), 0
        found: list[tuple[float, int, str]] = []
        for name in os.listdir(self._descriptor):
            with contextlib.suppress(FileNotFoundError):  # another process removed it first
                info = os.lstat(self._inside(name))
                found.append((now - info.st_mtime, info.st_size, name))
        for age, size, name in sorted(found):
            leftover = not name.endswith(".so")  # a temporary file of a killed writer
            kept += size
            if age > _IN_USE and (leftover or age > max_seconds or kept > max_bytes):
                kept -= size
                with contextlib.suppress(OSError):
                    os.unlink(self._inside(name))

    def _inside(self, name: str) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}") / name


@cache
def library_folder(root: Path | None) -> LibraryFolder:
    """Return the folder in the kernel cache's root, or a private one if that is impossible."""
    if root is not None:
        path = root / "host"
        if make_private_folder(root) and make_private_folder(path):
            with contextlib.suppress(OSError):
                return LibraryFolder(path)
        log.warning("kernel cache: %s cannot be created, or other users can write to it", path)
    return private_folder()


@cache
def private_folder() -> LibraryFolder:
    """Return this process's own folder, which is removed when the process exits."""
    temporary = tempfile.TemporaryDirectory(prefix="kiln-host-libraries-")
    return LibraryFolder(Path(temporary.name), temporary)


def _seal(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest()
