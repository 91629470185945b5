"""Atomic publication of files, and removal of the leftovers of killed writers.

| step                         | a crash, an error or a power cut here leaves                 |
|------------------------------|--------------------------------------------------------------|
| open O_EXCL, write, fsync    | a `.tmp-` file, never read; `sweep` removes it                |
| link to the final name       | the complete entry, and its temporary name, swept likewise    |
| unlink the temporary name    | nothing                                                      |

The folder itself is not synced: a power cut may remove the name again, which is a cache miss.
Works on NFS: the temporary file is in the final folder, and a link is atomic there. A published
file is not opened again, so a client's stale negative lookup does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from functools import cache
from pathlib import Path

_PREFIX = ".tmp-"
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{16})-([0-9]{1,9})-[0-9a-f]{32}")
_STALE = 3600.0  # seconds after which a writer cannot still be running
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no fsync


def publish(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file of mode 0644 and publish it atomically. Raises OSError.

    The first writer wins, and an existing file is never replaced. With ``replace`` the last writer
    wins, and a process that has the old file open can still read it.
    """
    temporary = path.parent / f"{_PREFIX}{_node()}-{os.getpid()}-{secrets.token_hex(16)}"
    try:
        _write(temporary, data)
        if replace:
            os.rename(temporary, path)
        else:
            _link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def sweep(folder: Path) -> int:
    """Remove the leftovers of dead writers from a folder; return how many. Never raises."""
    count = 0
    try:
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX)]
    except OSError:
        return 0
    for name in names:
        path = folder / name
        with contextlib.suppress(OSError):
            if _is_leftover(name, os.lstat(path).st_mtime):
                os.unlink(path)
                count += 1
    return count


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != 0o644:
            os.fchmod(fd, 0o644)  # a umask must not decide who can read a shared cache
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
    except OSError:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)  # NFS and quotas report failed writes here


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process published the same content first
    except OSError:  # a file system without hard links
        os.rename(temporary, path)


def _is_leftover(name: str, mtime: float) -> bool:
    # abs: if the clock was set back, a leftover must not stay for years.
    if abs(time.time() - mtime) > _STALE:
        return True
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match[1] == _node() and not _alive(int(match[2]))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True


@cache
def _node() -> str:
    """Return 16 hex digits that identify the boot of this machine and the pid namespace.

    A pid is valid only within both: containers may share a cache, but not pids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        text = boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        text = os.uname().nodename
    return hashlib.sha256(text.encode()).hexdigest()[:16]
