"""Measure how long something has held, without counting pauses of the process that looks."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST = 1.0  # seconds between two looks that count


class HeldFor:
    """For how many seconds a condition has held, by looks at it a fraction of a second apart.

    If this process was paused between two looks, nobody knows what the condition did meanwhile, and
    messages that end it are still unread. So a longer time between two looks counts as a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._looked = clock()

    def look(self, holds: bool) -> float:
        """Return for how many seconds the condition has held, if it still does; else 0."""
        now = self._clock()
        gap, self._looked = now - self._looked, now
        self.seconds = self.seconds + min(gap, _LONGEST) if holds else 0.0
        return self.seconds
