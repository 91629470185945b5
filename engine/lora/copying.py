"""Copy adapters into the pool while steps run."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from kiln.engine.lora.packing import PackedAdapter
from kiln.engine.lora.pool import AdapterPool


class Copier(Protocol):
    """Copies while steps run; no step may read the elements until a copy has ended."""

    def begin(self, adapter: PackedAdapter, slot: int, start: int) -> None:
        """Begin to copy an adapter to the elements from ``start`` on."""

    def ended(self, *, wait: bool) -> list[tuple[PackedAdapter, int, int]]:
        """Return adapter, slot and start of each copy that has ended, each once.

        With ``wait``, first wait for the oldest copy.
        """


class ThreadCopier:
    """Copies on a CPU, in a thread."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-lora-copy")
        self._copies: deque[tuple[Future[None], tuple[PackedAdapter, int, int]]] = deque()

    def begin(self, adapter: PackedAdapter, slot: int, start: int) -> None:
        """Queue a copy."""
        future = self._thread.submit(self._pool.write, adapter, start)
        self._copies.append((future, (adapter, slot, start)))

    def ended(self, *, wait: bool) -> list[tuple[PackedAdapter, int, int]]:
        """Return the copies that have ended."""
        found = []
        while self._copies and (wait or self._copies[0][0].done()):
            future, copy = self._copies.popleft()
            future.result()
            found.append(copy)
            wait = False
        return found


class StreamCopier:
    """Copies to a GPU, on a stream of its own."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool
        self._stream = torch.cuda.Stream(pool.values.device)
        # The pool's zeros are written on the current stream: a copy must not come before them.
        self._stream.wait_stream(torch.cuda.current_stream(pool.values.device))
        self._copies: deque[tuple[torch.cuda.Event, tuple[PackedAdapter, int, int]]] = deque()

    def begin(self, adapter: PackedAdapter, slot: int, start: int) -> None:
        """Queue a copy. All steps that could read these elements have been collected."""
        with torch.cuda.stream(self._stream):
            self._pool.write(adapter, start)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copies.append((event, (adapter, slot, start)))

    def ended(self, *, wait: bool) -> list[tuple[PackedAdapter, int, int]]:
        """Return the copies that have ended: a step that is launched from now on sees them."""
        if wait and self._copies:
            self._copies[0][0].synchronize()
        found = []
        while self._copies and self._copies[0][0].query():
            found.append(self._copies.popleft()[1])
        return found
