"""Detect kernels that are compiled or loaded after the engine is ready.

A compile while serving delays every client by about 0.1 s. Loading a module takes device memory
that the KV pool already owns. So both must happen before the engine reports ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

from kiln.jit_kernels.declare.errors import LateKernel
from kiln.jit_kernels.declare.settings import settings

log = logging.getLogger(__name__)


class ReadyGuard:
    """Whether this process is ready, and how it treats a kernel that is compiled or loaded late."""

    def __init__(self, policy: Literal["warn", "error"]) -> None:
        self._policy = policy
        self._ready = False
        self._preparing = 0
        self._lock = threading.Lock()

    def declare_ready(self) -> None:
        """Declare that all kernels are compiled and loaded. The guard is active from now on."""
        self._ready = True

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Allow compiling and loading while this process creates one more engine."""
        with self._lock:
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= 1

    @property
    def is_active(self) -> bool:
        """Whether a kernel would be compiled or loaded too late."""
        return self._ready and not self._preparing

    def passes(self, name: str, act: str) -> None:
        """Warn, or raise LateKernel, if a kernel is "compiled" or "loaded" (``act``) too late."""
        if not self.is_active:
            return
        message = f"{name} is {act} after the engine was ready: warm it up before serving"
        if self._policy == "error":
            raise LateKernel(f"{message} (KILN_JIT_AFTER_READY=error)")
        log.warning("%s", message)


@cache
def ready_guard() -> ReadyGuard:
    """Return the guard of this process."""
    return ReadyGuard(settings().jit_after_ready)
