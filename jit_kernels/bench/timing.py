"""Time implementations side by side: rounds of all of them in turn, on cold inputs.

On a GPU the launches are captured in a CUDA graph, so that the times exclude Python.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]  # one launch on its own inputs

MIN_ROUNDS, MAX_ROUNDS = 15, 60
_ROUND_SECONDS = 0.5e-3  # shortest round; a shorter one is mostly the noise of its two events
_WARM_SECONDS = 20e-3  # warm-up of all implementations together
_STEADY = 0.02  # spread / median below which measuring stops
_FAR = 3  # distance from the median, in spreads, of an outlier
_MIN_LAUNCHES = 16  # per graph: launching the graph itself takes microseconds
_LONG_SECONDS = 1.0  # limit for all rounds of one work
_MIN_LONG_ROUNDS = 3  # rounds of a work that exceeds that limit
_LAUNCH_SECONDS = 0.05  # limit for one pass over a slow work's calls, if it has several


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch: the median round, the interquartile range, the fastest round.

    ``outliers`` counts rounds far from the median, caused by another process on the device or by a
    change of clocks; they affect neither median nor spread. ``captured`` is False if the
    implementation cannot be captured in a CUDA graph; its launches were queued one by one.
    """

    median_us: float
    spread_us: float
    fastest_us: float
    rounds: int
    outliers: int
    captured: bool


class Work(Protocol):
    """A list of launches that can be repeated."""

    launches: int
    captured: bool

    def seconds(self, times: int) -> float:
        """Run all the launches this many times; return the seconds that they took."""
        ...


def time_side_by_side(
    works: Mapping[str, Work], *, min_rounds: int = MIN_ROUNDS, max_rounds: int = MAX_ROUNDS
) -> dict[str, Timing]:
    """Return the time of one launch of each work, from rounds in which all works run in turn.

    A slow change, such as of the clocks, thus affects all of them. The order rotates from round to
    round. Rounds are added until every spread is small relative to its median. A work of many
    milliseconds takes part in the first rounds only.
    """
    plans = {name: _plan(work) for name, work in works.items()}
    warmed = 0.0
    while works and warmed < _WARM_SECONDS:
        warmed += sum(work.seconds(plans[name][0]) for name, work in works.items())
    rounds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(max_rounds):
        for position in range(len(names)):
            name = names[(position + number) % len(names)]
            (times, most), work = plans[name], works[name]
            if number < most:
                rounds[name].append(work.seconds(times) * 1e6 / (times * work.launches))
        short = (rounds[name] for name in names if plans[name][1] >= min_rounds)
        if number + 1 >= min_rounds and all(map(_steady, short)):
            break
    return {name: _timing(rounds[name], works[name].captured) for name in works}


def _plan(work: Work) -> tuple[int, int]:
    """Return the repetitions of a work per round, and the maximum number of its rounds."""
    work.seconds(1)  # the first run of a graph uploads it
    seconds = max(work.seconds(1), 1e-7)
    times = max(1, math.ceil(_ROUND_SECONDS / seconds))
    return times, max(_MIN_LONG_ROUNDS, int(_LONG_SECONDS / (times * seconds)))


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _steady(values: Sequence[float]) -> bool:
    low, median, high = _quartiles(values)
    return high - low <= _STEADY * median


def _timing(values: Sequence[float], captured: bool) -> Timing:
    low, median, high = _quartiles(values)
    far = sum(abs(value - median) > _FAR * max(high - low, _STEADY * median) for value in values)
    return Timing(median, high - low, min(values), len(values), far, captured)


class CpuWork:
    """Calls on the CPU, timed by the CPU's clock."""

    captured = False

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self.launches = len(calls)

    def seconds(self, times: int) -> float:
        """Run all the calls this many times; return the seconds that they took."""
        begun = time.perf_counter()
        for _ in range(times):
            for call in self._calls:
                call()
        return time.perf_counter() - begun


class GpuWork:
    """Calls that queue kernels, in a CUDA graph if they can be captured."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)
        torch.cuda.synchronize()  # inputs are complete for any stream and for early launches
        may_be_captured = self._may_be_captured()
        seconds = self._first_seconds()
        if seconds * len(calls) > _LAUNCH_SECONDS:
            self._calls = self._calls[: max(1, int(_LAUNCH_SECONDS / seconds))]
        elif len(calls) < _MIN_LAUNCHES:
            self._calls *= math.ceil(_MIN_LAUNCHES / len(calls))
        self.launches = len(self._calls)
        self._graph = self._capture() if may_be_captured else None
        self.captured = self._graph is not None
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def _may_be_captured(self) -> bool:
        """Run two calls to compile, load and allocate; then check that a call does not synchronize.

        Synchronizing inside a capture is an error and may leave the allocator in a bad state.
        """
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in self._calls[:2]:
                call()
            torch.cuda.synchronize()
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                self._calls[0]()
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                return False
            finally:
                torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
        return True

    def _first_seconds(self) -> float:
        begun = time.perf_counter()
        self._calls[0]()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in self._calls:
                call()
        torch.cuda.synchronize()
        return graph

    def seconds(self, times: int) -> float:
        """Run all the calls this many times; return the seconds that the device took."""
        self._start.record()
        for _ in range(times):
            if self._graph is not None:
                self._graph.replay()
            else:
                for call in self._calls:
                    call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3
