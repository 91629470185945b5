"""The statistics of a load are those of their definitions."""

from __future__ import annotations

import statistics

import pytest

from kiln.engine.bench.load_client import Measured
from kiln.engine.bench.load_metrics import summarise

ANSWERS = [
    Measured(0.0, [0.1, 0.2, 0.4], output_tokens=3, prompt_tokens=7),
    Measured(1.0, [1.5, 1.5, 1.9], output_tokens=5, prompt_tokens=8),  # two tokens in an event
    Measured(2.0, [2.2], output_tokens=1, prompt_tokens=9),
    Measured(3.0, error="refused"),
    Measured(3.0, [3.1], error="refused"),
]


def test_each_latency_has_its_statistics():
    row = summarise(4.0, ANSWERS, (50, 99))
    ttft, tpot = [100, 500, 200], [150, 100]
    itl, e2el = [100, 200, 0, 400], [400, 900, 200]
    for name, values in {"ttft": ttft, "tpot": tpot, "itl": itl, "e2el": e2el}.items():
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        assert row[f"mean_{name}_ms"] == pytest.approx(statistics.mean(values))
        assert row[f"median_{name}_ms"] == pytest.approx(statistics.median(values))
        assert row[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(values))
        assert row[f"p50_{name}_ms"] == pytest.approx(cuts[49])
        assert row[f"p99_{name}_ms"] == pytest.approx(cuts[98])


def test_failed_requests_are_counted_and_not_timed():
    row = summarise(4.0, ANSWERS)
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (3, 24, 9)
    assert row["failures"] == {"refused": 2}
    assert row["requests_per_s"] == 0.75
    assert row["output_tokens_per_s"] == 2.25
    assert row["total_tokens_per_s"] == 8.25
    none = summarise(4.0, ANSWERS[3:])
    assert (none["requests"], none["failures"]) == (0, {"refused": 2})
    assert "median_ttft_ms" not in none


@pytest.mark.parametrize(
    ("goals", "met"),
    [({"ttft": 100.1}, 1), ({"ttft": 600}, 3), ({"ttft": 600, "tpot": 120}, 2), ({"e2el": 1}, 0)],
)
def test_goodput_counts_the_requests_that_meet_every_goal(goals, met):
    assert summarise(4.0, ANSWERS, goals=goals)["request_goodput"] == met / 4.0
    assert "request_goodput" not in summarise(4.0, ANSWERS)
