"""A device that copies late: what is written to a buffer too early arrives wrong."""

from __future__ import annotations

import random
import threading

import torch


class LateCopier:
    """Copies when it must, or by chance, in the order in which it was told, as a stream does.

    ``buffers``: how many were made.
    """

    def __init__(self, seed=0):
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._queue = []
        self._done = 0
        self.buffers = 0

    def buffer(self, num_bytes):
        self.buffers += 1
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def copy(self, out, stored):
        with self._lock:
            self._queue.append((out, stored))
            told = self._done + len(self._queue)
        if self._chance.random() < 0.3:
            self._run(told)
        return lambda: self._run(told)

    def _run(self, told):
        with self._lock:
            while self._done < told:
                out, stored = self._queue.pop(0)
                out.copy_(stored)
                self._done += 1

    def synchronize(self):
        with self._lock:
            told = self._done + len(self._queue)
        self._run(told)


class PromptCopier(LateCopier):
    """A device that copies at once, as a stream looks to what follows on it."""

    def copy(self, out, stored):
        out.copy_(stored)
        return lambda: None
