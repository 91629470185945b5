"""One builder per key on one machine: saves work twice done, and nothing depends on it.

The locks lie in a folder of this machine, never in the cache, which may be on a network. Whoever
cannot lock, or has waited long enough, builds all the same: the same bytes come out.
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

from kiln.cache.env import Env, user_runtime_folder
from kiln.cache.trust import close_quietly, make_private_folder

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")
# Lock files are never deleted (a deleted one would be locked by two at once), so keys share 4096.
_DIGITS = 3
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.02  # seconds between two attempts


@contextlib.contextmanager
def builder_lock(folder: Path | None, key: str, seconds: float = 30.0) -> Iterator[bool]:
    """Hold the lock of a key for the length of a ``with``; yield whether it is held.

    It is not when there is no folder, when the file system has no locks, and when another builder
    still holds it after ``seconds``. Look the key up again inside: the one before may have built
    it. Never raises OSError of its own; raises ValueError when key is no digest.
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
            # Not only close: a child that was forked meanwhile has the descriptor too.
            fcntl.flock(fd, fcntl.LOCK_UN)
        close_quietly(fd)


def lock_folder(env: Env) -> Path | None:
    """Return the folder of locks, made and checked, or None where none can be trusted.

    ``KILN_KERNEL_LOCK_DIR``, else kiln/ in the user's runtime folder, else one in /dev/shm.
    """
    chosen = env.kernel_lock_dir
    if chosen is not None:
        if make_private_folder(chosen.absolute()):
            return chosen.absolute()
        log.warning(
            "kernel cache: KILN_KERNEL_LOCK_DIR=%s cannot be made, or others can write it: "
            "processes that start together each compile for themselves",
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
        except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP …: no locks here
            return False
