"""After "ready", no kernel is compiled or loaded: what should have come before is told.

A compile in the middle of serving costs every client some 0.1 s, and a load takes device memory
that was given away; so both belong before the engine says that it is ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

from kiln.jit_kernels.errors import LateKernel
from kiln.jit_kernels.settings import settings

log = logging.getLogger(__name__)


class ReadyGuard:
    """Whether this process serves already, and what becomes of a kernel that comes too late."""

    def __init__(self, policy: Literal["warn", "error"]) -> None:
        self._policy = policy
        self._ready = False
        self._preparing = 0
        self._lock = threading.Lock()

    def declare_ready(self) -> None:
        """Say that everything is compiled and loaded: from now on the guard speaks."""
        self._ready = True

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Allow compiling and loading meanwhile: one more engine is being made in this process."""
        with self._lock:
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= 1

    def passes(self, name: str, act: str) -> None:
        """Let a kernel be compiled or loaded (``act`` says which), or warn or raise LateKernel."""
        if not self._ready or self._preparing:
            return
        message = f"{name} is {act} after the engine was ready: warm it up before serving"
        if self._policy == "error":
            raise LateKernel(f"{message} (KILN_JIT_AFTER_READY=error)")
        log.warning("%s", message)


@cache
def ready_guard() -> ReadyGuard:
    """Return the guard of this process."""
    return ReadyGuard(settings().jit_after_ready)
