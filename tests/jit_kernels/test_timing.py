"""Timing side by side: the order of rounds, the statistics, and when it stops."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.bench.timing import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    CpuWork,
    GpuWork,
    time_side_by_side,
)


class Fake:
    """A work whose launches take ``seconds(number of the run)``."""

    captured = True

    def __init__(self, log, name, seconds_of, launches=1):
        self.launches, self._log, self._name, self._seconds_of = launches, log, name, seconds_of
        self.runs = 0

    def seconds(self, times):
        self._log.append(self._name)
        self.runs += 1
        return times * self.launches * self._seconds_of(self.runs)


def test_a_time_is_of_one_launch_whatever_the_number_in_a_graph():
    works = {"a": Fake([], "a", lambda run: 3e-6, launches=64), "b": Fake([], "b", lambda run: 2.0)}
    times = time_side_by_side(works)
    assert times["a"].median_us == pytest.approx(3)
    assert times["b"].median_us == pytest.approx(2e6)
    assert times["a"].spread_us == pytest.approx(0)


def test_steady_times_need_the_fewest_rounds_and_noisy_ones_the_most():
    steady = time_side_by_side({"a": Fake([], "a", lambda run: 1e-3)})["a"]
    noisy = time_side_by_side({"a": Fake([], "a", lambda run: 1e-3 * (1 + run % 2))})["a"]
    assert (steady.rounds, noisy.rounds) == (MIN_ROUNDS, MAX_ROUNDS)
    assert noisy.spread_us == pytest.approx(1000)


def test_slow_work_takes_part_in_few_rounds_and_does_not_hold_up_the_others():
    slow, fast = Fake([], "slow", lambda run: 2.0), Fake([], "fast", lambda run: 1e-3)
    times = time_side_by_side({"slow": slow, "fast": fast})
    assert times["slow"].rounds == 3
    assert times["slow"].median_us == pytest.approx(2e6)
    assert times["fast"].rounds == MIN_ROUNDS


def test_all_take_turns_and_the_first_turn_changes_hands():
    log = []
    works = {name: Fake(log, name, lambda run: 1e-3) for name in "abc"}
    time_side_by_side(works, min_rounds=6, max_rounds=6)
    rounds = ["".join(log[-18:][i : i + 3]) for i in range(0, 18, 3)]
    assert rounds == ["abc", "bca", "cab", "abc", "bca", "cab"]


def test_a_round_that_is_far_off_is_counted_and_moves_neither_median_nor_spread():
    sized_up, warmed_up = 2, 20  # runs of a millisecond before the first round
    slow = sized_up + warmed_up + 5
    work = Fake([], "a", lambda run: 50e-3 if run == slow else 1e-3)
    timing = time_side_by_side({"a": work}, max_rounds=MIN_ROUNDS)["a"]
    assert work.runs == sized_up + warmed_up + MIN_ROUNDS
    assert timing.outliers == 1
    assert timing.median_us == timing.fastest_us == pytest.approx(1000)
    assert timing.spread_us == pytest.approx(0)


def test_short_work_is_repeated_until_a_round_is_long_enough_to_time():
    longest = []

    class Short(Fake):
        def seconds(self, times):
            longest.append(times)
            return super().seconds(times)

    time_side_by_side({"a": Short([], "a", lambda run: 1e-6)})
    assert max(longest) in (500, 501)  # half a millisecond
    assert longest[:2] == [1, 1]


def test_calls_on_the_cpu_are_all_made_each_time():
    made = []
    work = CpuWork([lambda: made.append(1), lambda: made.append(2)])
    assert work.seconds(3) > 0
    assert made == [1, 2] * 3
    assert work.launches == 2


def test_nothing_to_time_is_no_error():
    assert time_side_by_side({}) == {}


def test_inputs_are_there_before_another_stream_is_given_a_call(monkeypatch):
    """The first calls run on another stream, which does not wait for the inputs' writers."""
    seen = []

    def no_more():
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "Stream", no_more)
    with pytest.raises(InterruptedError):
        GpuWork([lambda: seen.append("called")])
    assert seen == ["synchronized"]
