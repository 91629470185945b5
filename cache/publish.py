"""Files that appear whole or not at all, and the leftovers of writers that were killed.

| step                         | a crash, an error or a power cut here leaves                 |
|------------------------------|--------------------------------------------------------------|
| open O_EXCL, write, fsync    | a `.tmp-` file, which nobody reads and a sweep removes        |
| link to the final name       | the whole entry, and a second name of it, swept likewise      |
| unlink the temporary name    | nothing                                                      |

The folder itself is not synced: a power cut may take the name away again, which is a miss.
Works on NFS: the folder is the target's own, a link is atomic there, and nothing is opened again
after it was published, so that a client's stale "no such file" cannot matter.
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
_STALE = 3600.0  # seconds after which no writer can still be at work
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no fsync


def publish(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file of mode 0644 and put it in place in one step. Raises OSError.

    The first writer wins, and a file that somebody may have open is never replaced; with
    ``replace`` the last writer wins, and who has the old file open keeps it.
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
    os.close(fd)  # here NFS and quotas report what they could not write


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # somebody else published the same content first
    except OSError:  # a file system without hard links
        os.rename(temporary, path)


def _is_leftover(name: str, mtime: float) -> bool:
    # Either side of now: a clock that was set back must not keep a leftover for years.
    if abs(time.time() - mtime) > _STALE:
        return True
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match[1] == _node() and not _alive(int(match[2]))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's process
        return True
    return True


@cache
def _node() -> str:
    """Return 16 hex digits for the set of processes whose ids mean the same as here.

    That is one boot of one machine and one pid namespace: containers share a cache, not pids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        text = boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        text = os.uname().nodename
    return hashlib.sha256(text.encode()).hexdigest()[:16]
