"""The queue time is that to a request's first step, and is told with its first output."""

from __future__ import annotations

from kiln.engine.requests.request import Request, TokenOutput, merged
from kiln.engine.requests.sampling_params import SamplingParams


def test_a_preempted_request_keeps_its_first_queue_time():
    request = Request("a", [1, 2], 2, SamplingParams(), 5, 2, 9, frozenset(), True)
    request.arrival -= 10
    assert request.told_once == (5, None, None, 0, None)
    assert request.begin(3)
    assert request.row == 3
    seed, seconds, *_ = request.told_once
    assert seed == 5
    assert 10 <= seconds < 1000
    assert not request.begin(4)
    assert request.told_once == (5, seconds, None, 0, None)
    request.token_ids.append(7)
    assert request.told_once == (None, None, None, 0, None)


def test_merged_outputs_keep_it():
    first = TokenOutput("a", [1], seed=5, queue_seconds=0.5)
    assert merged([first, TokenOutput("a", [2], "stop")]).queue_seconds == 0.5
