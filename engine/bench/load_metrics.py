"""The numbers of one load on one server, under the names of vLLM's benchmark."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from kiln.engine.bench.load_client import Measured
from kiln.engine.bench.report import Row
from kiln.engine.bench.workload import throughput

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between two events of a stream",
    "e2el": "time of a whole request",
}


def summarise(
    seconds: float,
    answers: Sequence[Measured],
    percentiles: Sequence[float] = (99,),
    goals: Mapping[str, float] | None = None,
) -> Row:
    """Return the numbers of one run, latencies in milliseconds.

    A request that failed is counted in ``failures`` by its error, and nowhere else. ``goals``: the
    longest ms of some metrics; ``request_goodput`` is the requests per second that meet all.
    """
    good = [one for one in answers if not one.error]
    tokens_in = sum(one.prompt_tokens for one in good)
    tokens_out = sum(one.output_tokens for one in good)
    row = throughput(len(good), tokens_in, tokens_out, seconds)
    row["total_tokens_per_s"] = (tokens_in + tokens_out) / seconds
    row["failures"] = dict(Counter(one.error for one in answers if one.error))
    timed = [_times(one) for one in good if one.events]
    for name in METRICS:
        values = sorted(value for each in timed for value in each[name])
        row |= _statistics(f"{name}_ms", values, percentiles)
    if goals:
        met = sum(
            all(value <= most for name, most in goals.items() for value in each[name])
            for each in timed
        )
        row["request_goodput"] = met / seconds
    return row


def _times(answer: Measured) -> dict[str, list[float]]:
    """Return each metric's values in one response, in milliseconds.

    Its time per output token counts the tokens, also those that came in one event.
    """
    events = answer.events
    after_first = answer.output_tokens - 1
    each_token = [1000 * (events[-1] - events[0]) / after_first] if after_first > 0 else []
    return {
        "ttft": [1000 * (events[0] - answer.started)],
        "tpot": each_token,
        "itl": [1000 * (late - early) for early, late in pairwise(events)],
        "e2el": [1000 * (events[-1] - answer.started)],
    }


def _statistics(name: str, ordered: Sequence[float], percentiles: Iterable[float]) -> Row:
    if not ordered:
        return {}
    mean = math.fsum(ordered) / len(ordered)
    spread = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    return {
        f"mean_{name}": mean,
        f"median_{name}": _percentile(ordered, 50),
        f"std_{name}": math.sqrt(spread),
        **{f"p{percent:g}_{name}": _percentile(ordered, percent) for percent in percentiles},
    }


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between the nearest two values."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
