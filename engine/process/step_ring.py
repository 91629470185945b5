"""The last steps, of this engine and of those before it that ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from kiln.engine.requests.step_log import MOST_STEPS, StepRecord

_WATCH_SECONDS = 30.0  # for which the engine sends records after it was asked to
_ASK_EVERY = 10.0  # seconds


class SeenStep(NamedTuple):
    """A step, and which engine ran it: 1 is the first one, and each restart begins another."""

    engine: int
    record: StepRecord


class StepRing:
    """Keeps the newest records. It may outlive the client that fills it.

    Records have positions from 0 on, which count across engines and are never used twice.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.engine = 0  # how many were ready so far
        self.end = 0  # the position of the next record
        self._steps: deque[SeenStep] = deque(maxlen=most)
        self._asked = -_ASK_EVERY

    def begin_engine(self) -> None:
        """Note that a new engine is ready. It knows nothing of who watches."""
        self.engine += 1
        self._asked = -_ASK_EVERY

    def add(self, records: Iterable[StepRecord]) -> None:
        """Keep new records."""
        for record in records:
            self._steps.append(SeenStep(self.engine, record))
            self.end += 1

    def since(self, position: int) -> tuple[int, list[SeenStep]]:
        """Return the position of the first record that is kept from there on, and all from it."""
        oldest = self.end - len(self._steps)
        first = min(max(position, oldest), self.end)
        return first, list(islice(self._steps, first - oldest, None))

    def watch(self, ask: Callable[[float], None]) -> None:
        """Have the engine send records for a while. ``ask`` sends it how long, if it must know."""
        now = time.monotonic()
        if now - self._asked >= _ASK_EVERY:
            self._asked = now
            ask(_WATCH_SECONDS)
