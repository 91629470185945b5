"""The counts of tokens: every token changes them, at the cost of two additions and a search.

``prometheus_client`` takes a lock for each of its numbers, and looks at each bucket in turn. Only
the event loop counts tokens, so no lock is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds


class TokenMetrics(Collector):
    """Counts the tokens of prompts and outputs, and the times between two outputs of a request."""

    def __init__(self) -> None:
        self.prompt = 0  # tokens
        self.generated = 0
        self._seconds = 0.0
        self._counts = [0] * (len(_BOUNDS) + 1)  # the last: above all bounds

    def add_prompt(self, tokens: int) -> None:
        """Count the tokens of a prompt, once its answer has begun."""
        self.prompt += tokens

    def first(self, tokens: int) -> None:
        """Count the tokens of the first output of a request."""
        self.generated += tokens

    def next(self, tokens: int, seconds: float) -> None:
        """Count the tokens of an output that came ``seconds`` after the one before."""
        self.generated += tokens
        self._seconds += seconds
        self._counts[bisect_left(_BOUNDS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all three metrics."""
        text = "Prompt tokens of served requests."
        yield CounterMetricFamily("kiln:prompt_tokens", text, self.prompt)
        yield CounterMetricFamily("kiln:generation_tokens", "Tokens generated.", self.generated)
        bounds = [*map(floatToGoString, _BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        name, text = "kiln:inter_token_latency_seconds", "Between two tokens of an output."
        yield HistogramMetricFamily(name, text, buckets, self._seconds)
