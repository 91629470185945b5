"""One builder per key on one machine: saves duplicate work; correctness does not depend on it.

The locks are in a local folder, never in the cache, which may be on a network file system. A
process that cannot lock, or whose wait times out, builds the kernel anyway: the bytes are the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from kiln.cache.disk.trust import close_quietly, make_private_folder
from kiln.cache.env import Env, user_runtime_folder

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")
# Lock files are never deleted (else two processes could hold one lock), so keys share 4096 files.
_DIGITS = 3
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.02  # seconds between two attempts


@contextlib.contextmanager
def builder_lock(folder: Path | None, key: str, seconds: float = 30.0) -> Iterator[bool]:
    """Hold the lock of a key inside a ``with`` block; yield whether it is held.

    It is not held if there is no folder, if the file system has no locks, or if another builder
    still holds it after ``seconds``. Look up the key again inside: the previous holder may have
    built it. Never raises OSError itself. Raises ValueError on a malformed key.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}: want 64 hex digits")
    fd = None if folder is None else _open(folder / key[:_DIGITS])
    if fd is None:
        yield False
        return
    held = _lock(fd, seconds)
    try:
        yield held
    finally:
        with contextlib.suppress(OSError):
            # close is not enough: a child forked meanwhile shares the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
        close_quietly(fd)


def lock_folder(env: Env) -> Path | None:
    """Create and check the folder of locks and return it, or None if no trusted folder exists.

    It is ``KILN_KERNEL_LOCK_DIR``, else kiln/ in the user's runtime folder, else in /dev/shm.
    """
    chosen = env.kernel_lock_dir
    if chosen is not None:
        if make_private_folder(chosen.absolute()):
            return chosen.absolute()
        log.warning(
            "kernel cache: KILN_KERNEL_LOCK_DIR=%s cannot be created, or others can write to "
            "it: processes that start together compile the same kernels",
            chosen,
        )
        return None
    choices = [(user_runtime_folder(), "kiln"), (Path("/dev/shm"), f"kiln-{os.geteuid()}")]
    for above, name in choices:
        if above is not None and above.is_dir() and make_private_folder(above / name):
            return above / name
    return None


def _open(path: Path) -> int | None:
    try:
        return os.open(path, _FLAGS, 0o600)
    except OSError:
        return None


def _lock(fd: int, seconds: float) -> bool:
    deadline, wait = time.monotonic() + seconds, _FIRST_WAIT
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(wait, left))
            wait = min(wait * 1.5, _LONGEST_WAIT)
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP …: no locks on this file system
            return False
