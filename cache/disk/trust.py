"""Whether a file may be trusted: its owner is trusted, and no other user can write to it.

Checks are made on open descriptors, so that a file cannot be swapped between check and use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# O_NONBLOCK: opening a FIFO that another user planted must not wait for a writer.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a link, a socket, a dead device


class Untrusted(Exception):
    """A file or folder is not trusted; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The trusted users. In a ``shared`` cache the folders may be writable by their group."""

    uids: frozenset[int] = field(default_factory=lambda: frozenset({os.geteuid(), 0}))
    shared: bool = False

    @property
    def folder_mode(self) -> int:
        """The mode of new folders."""
        return 0o2775 if self.shared else 0o700

    def check_file(self, path: Path | str, info: os.stat_result) -> None:
        """Raise Untrusted unless this is a regular file that only trusted users can write."""
        if not stat.S_ISREG(info.st_mode):
            raise Untrusted(f"{path} is not a regular file; remove it")
        self._check_owner(path, info, _OTHERS_WRITE)

    def check_folder(self, path: Path | str, info: os.stat_result) -> None:
        """Raise Untrusted unless this is a folder that only trusted users can write."""
        if stat.S_ISLNK(info.st_mode):
            raise Untrusted(f"{path} is a symbolic link; use the path that it points to")
        if not stat.S_ISDIR(info.st_mode):
            raise Untrusted(f"{path} is not a folder")
        self._check_owner(path, info, stat.S_IWOTH if self.shared else _OTHERS_WRITE)

    def _check_owner(self, path: Path | str, info: os.stat_result, mask: int) -> None:
        if info.st_uid not in self.uids:
            raise Untrusted(
                f"{path} belongs to user {info.st_uid}, who is not trusted; "
                "KILN_KERNEL_TRUSTED_UIDS can add them"
            )
        if info.st_mode & mask:
            raise Untrusted(
                f"others can write {path} (mode {stat.S_IMODE(info.st_mode):o}); "
                "run chmod go-w, or set KILN_KERNEL_CACHE_SHARED=1 for a group"
            )


def open_checked(path: Path | str, trust: Trust) -> tuple[int, os.stat_result]:
    """Open a trusted file for reading; return its descriptor and what fstat says.

    Raises Untrusted, and OSError if it is absent or cannot be read.
    """
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise Untrusted(f"{path} is not a regular file; remove it") from None
        if isinstance(error, PermissionError):
            raise Untrusted(f"{path} may not be read: {error.strerror}") from None
        raise
    try:
        info = os.fstat(fd)
        trust.check_file(path, info)
    except (OSError, Untrusted):
        close_quietly(fd)
        raise
    return fd, info


def open_trusted(path: Path, trust: Trust | None = None) -> int | None:
    """Open a regular file for reading and return the descriptor, or None.

    None if it is absent, a symbolic link, not a regular file, owned by a user who is not trusted
    (default: anyone but this user and root), or writable by group or others.
    """
    try:
        return open_checked(path, trust or Trust())[0]
    except (OSError, Untrusted):
        return None


def read_all(fd: int, size: int) -> bytes:
    """Return all bytes of an open file that had ``size`` bytes when checked. Raises OSError."""
    data = os.read(fd, size + 1)
    if len(data) == size:
        return data
    parts = [data]
    while parts[-1]:  # the file grew, or a read was short
        parts.append(os.read(fd, size + 1))
    return b"".join(parts)


def close_quietly(fd: int) -> None:
    """Close a descriptor that was only read; errors of close do not matter then."""
    with contextlib.suppress(OSError):
        os.close(fd)


def make_folder(path: Path, trust: Trust) -> None:
    """Create a folder and its missing parents; an existing folder must be trusted.

    The mode is 0700, or 2775 in a shared cache, despite the umask. Raises OSError and Untrusted.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        _make(path, trust)
        info = os.lstat(path)
    trust.check_folder(path, info)


def make_private_folder(path: Path, trust: Trust | None = None) -> bool:
    """Call ``make_folder``; return whether the folder exists and is trusted."""
    try:
        make_folder(path, trust or Trust())
    except (OSError, Untrusted):
        return False
    return True


def _make(path: Path, trust: Trust) -> None:
    try:
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            _make(path.parent, trust)
            os.mkdir(path, 0o700)
    except FileExistsError:
        return  # another process created it first
    os.chmod(path, trust.folder_mode)  # mkdir applies the umask
