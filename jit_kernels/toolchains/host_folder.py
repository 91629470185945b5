"""The folder of built host libraries: what it holds is code that this process will run.

A library is published whole or not at all, and loaded only from a folder and a file that are ours
and that nobody else can write; both are checked on open descriptors, and the file is opened by the
loader through the very folder that was checked.
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
from functools import cache
from pathlib import Path

from kiln.cache.trust import make_private_folder, open_trusted

_DIGEST_SIZE = 32

log = logging.getLogger(__name__)


class LibraryFolder:
    """Libraries by key, in a folder of mode 0700 that stays open for the life of the process."""

    def __init__(self, path: Path, keep: object = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        info = os.fstat(self._descriptor)
        if info.st_uid not in (os.geteuid(), 0) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.close(self._descriptor)
            raise PermissionError(f"{path} is not ours, or others can write it")
        self._keep = keep

    def holds(self, key: str) -> bool:
        """Return whether a whole and trusted library of this key is here."""
        fd = open_trusted(self._inside(f"{key}.so"))
        if fd is None:
            return False
        with os.fdopen(fd, "rb") as file:
            data = file.read()
        return data[-_DIGEST_SIZE:] == _seal(key, data[:-_DIGEST_SIZE])

    def publish(self, key: str, library: bytes) -> None:
        """Write a library and put it in place in one step. Raises OSError.

        The seal follows the library's own bytes, where the loader does not look. A damaged or
        foreign file of the same name is replaced; a process that has it open keeps the old one.
        """
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
        """Load a library that ``holds`` has just found. Raises OSError."""
        return ctypes.CDLL(str(self._inside(f"{key}.so")), mode)

    def _inside(self, name: str) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}") / name


@cache
def library_folder(root: Path | None) -> LibraryFolder:
    """Return the folder below the kernel cache's root, or a private one where that cannot be."""
    if root is not None:
        path = root / "host"
        if make_private_folder(root) and make_private_folder(path):
            with contextlib.suppress(OSError):
                return LibraryFolder(path)
        log.warning("kernel cache: %s cannot be made, or others can write it", path)
    return private_folder()


@cache
def private_folder() -> LibraryFolder:
    """Return this process's own folder, which goes when the process ends."""
    temporary = tempfile.TemporaryDirectory(prefix="kiln-host-libraries-")
    return LibraryFolder(Path(temporary.name), temporary)


def _seal(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest()
