"""When the requests of a load are sent, in vLLM's terms."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent.

    ``concurrency``: the most at a time; None: no limit. ``rate``: requests per second at random
    times; None: each as soon as the limit allows. ``burstiness``: the shape of the gamma
    distribution of the times between two requests. 1: a Poisson process; less: bursts; more: even
    times.
    """

    concurrency: int | None
    rate: float | None = None
    burstiness: float = 1.0

    def times(self, count: int, seed: int = 0) -> list[float]:
        """Return the earliest times of ``count`` requests, in seconds from the start.

        They are the same for a seed, and scaled to the exact rate, as vLLM's benchmark does.
        """
        if self.rate is None:
            return [0.0] * count
        draw, shape = random.Random(seed), self.burstiness
        even = math.isinf(shape)
        gaps = [1.0 if even else draw.gammavariate(shape, 1.0) for _ in range(count)]
        times = list(accumulate(gaps))
        return [time / times[-1] * count / self.rate for time in times]

    def __str__(self) -> str:
        limit = "" if self.concurrency is None else f"{self.concurrency} at a time"
        if self.rate is None:
            return limit or "all at once"
        return f"{self.rate:g} a second" + (f", at most {limit}" if limit else "")
