"""Whether a file on disk may be believed: ours or root's, and nobody else can write it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = 0o022


def open_trusted(path: Path) -> int | None:
    """Open a regular file for reading and return the descriptor, or None.

    None when it is absent, a symbolic link, not a regular file, owned by somebody other than
    this user or root, or writable by group or others. The checks are made on the descriptor, so
    the file cannot be swapped between check and use.
    """
    try:
        # O_NONBLOCK: opening a FIFO that somebody planted must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and _is_ours(info):
        return fd
    os.close(fd)
    return None


def make_private_folder(path: Path) -> bool:
    """Create a folder of mode 0700 with its parents; return whether it may be trusted.

    An existing folder must be ours or root's, no symbolic link, and writable by nobody else.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and _is_ours(info)


def _is_ours(info: os.stat_result) -> bool:
    return info.st_uid in (os.geteuid(), 0) and not info.st_mode & _OTHERS_WRITE
