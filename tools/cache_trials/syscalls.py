"""Hooks on the cache's system calls: make one of them fail, or kill the process there."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Every call that cache/ makes; `test_faults.py` detects calls that are missing here.
OS_CALLS = (
    *("open", "close", "read", "write", "fstat", "lstat", "fsync", "fchmod", "chmod", "link"),
    *("rename", "unlink", "mkdir", "listdir", "utime"),
)
ERRORS = tuple(
    getattr(errno, name)
    for name in ("ENOSPC", "EROFS", "EACCES", "EIO", "ESTALE", "EBUSY", "EXDEV", "ENOTEMPTY")
)

Hook = Callable[[int, str, Callable[[], Any]], Any]  # number, name, the call


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Route every call of the protocol through ``hook``, numbered from 0."""
    originals = [(os, name, getattr(os, name)) for name in OS_CALLS]
    originals.append((fcntl, "flock", fcntl.flock))
    count = 0

    def through(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            number, count = count, count + 1
            return hook(number, name, lambda: call(*args, **kwargs))

        return run

    for module, name, call in originals:
        setattr(module, name, through(name, call))
    try:
        yield
    finally:
        for module, name, call in originals:
            setattr(module, name, call)


def failing(number: int, error: int, *, forever: bool) -> Hook:
    """Return a hook that fails call ``number``, and later ones of its name when ``forever``."""
    target: str | None = None

    def hook(now: int, name: str, call: Callable[[], Any]) -> Any:
        nonlocal target
        if now == number:
            target = name
        if now == number or (forever and name == target):
            if name == "close":
                call()  # Linux frees the descriptor even if close fails
            raise OSError(error, f"{os.strerror(error)} (injected into {name})")
        return call()

    return hook


def killing(number: int, *, after: bool) -> Hook:
    """Return a hook that kills this process before, or just after, call ``number``."""

    def hook(now: int, name: str, call: Callable[[], Any]) -> Any:
        if now == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call()
        finally:
            if now == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def counting(seen: list[str]) -> Hook:
    """Return a hook that records the names of the calls."""

    def hook(now: int, name: str, call: Callable[[], Any]) -> Any:
        seen.append(name)
        return call()

    return hook
