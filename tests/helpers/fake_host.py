"""Host memory for the KV blocks of a FakeRunner, whose copies end late, and may fail."""

from __future__ import annotations

import random
from collections import deque


class FakeHost:
    """Copies end some calls of ``ended`` after their beginning, in order.

    A store reads its blocks when it begins or when it ends; a load writes when it ends, and until
    then its blocks hold nothing that a step may read. ``fails``: the share of copies that raise.
    """

    def __init__(self, runner, num_slots, seed=0, *, latest=3, fails=0.0):
        self.num_slots = num_slots
        self.slots = [None] * num_slots
        self._runner, self._chance = runner, random.Random(seed)
        self._latest, self._fails = latest, fails
        self._copies = deque()
        self.num_failed = 0

    def store(self, blocks, slots):
        held = [self._read(block) for block in blocks] if self._chance.random() < 0.5 else None

        def end():
            for index, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
                self.slots[slot] = self._read(block) if held is None else held[index]

        self._begin(end, slots)

    def load(self, blocks, slots):
        def end():
            for block, slot in zip(blocks, slots, strict=True):
                self._write(block, self.slots[slot])

        for block in blocks:
            self._write(block, ["on its way"] * self._runner.block_size)
        self._begin(end, slots)

    def ended(self, *, wait=False):
        results = []
        while self._copies and (self._copies[0][0] <= 0 or (wait and not results)):
            results.append(self._end())
        self._copies = deque((left - 1, *rest) for left, *rest in self._copies)
        return results

    def drain(self):
        while self._copies:
            self._end()

    @property
    def num_copies(self):
        return len(self._copies)

    def _begin(self, end, slots):
        busy = {slot for _, _, others in self._copies for slot in others}
        assert busy.isdisjoint(slots)
        assert len(set(slots)) == len(slots)
        self._copies.append((self._chance.randint(0, self._latest), end, slots))

    def _end(self):
        _, end, _ = self._copies.popleft()
        if self._chance.random() < self._fails:
            self.num_failed += 1
            return OSError("no copy")
        end()
        return None

    def _read(self, block):
        size = self._runner.block_size
        return self._runner.slots[block * size : (block + 1) * size]

    def _write(self, block, tokens):
        size = self._runner.block_size
        self._runner.slots[block * size : (block + 1) * size] = tokens
