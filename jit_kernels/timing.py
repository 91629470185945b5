"""How long a kernel takes on the GPU, by replaying a graph of many launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# More bytes than any L2: rotating through copies of the inputs keeps every launch cold.
_COLD_BYTES = 256 << 20
_MAX_COPIES = 64
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch: the median round, and the spread of the middle half."""

    median_us: float
    spread_us: float


def copies_for(bytes_touched: int) -> int:
    """Return how many copies of the inputs make each launch find the L2 cold."""
    return max(2, min(_MAX_COPIES, -(-_COLD_BYTES // max(bytes_touched, 1))))


def time_launches(run: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> Timing:
    """Return the time of ``run(*inputs[i])``, averaged over one replay of all inputs.

    The launches are captured in one CUDA graph, so that the cost of Python is not in the number;
    the median and spread are over rounds of replays. Needs a CUDA device.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for arguments in inputs[:2]:
            run(*arguments)  # compile and load outside the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in inputs:
            run(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) * 1000 / len(inputs))
    low, median, high = statistics.quantiles(rounds, n=4)
    return Timing(median, high - low)


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Return the device's own copy bandwidth in bytes read and written a second.

    The faster of the driver's copy and of a kernel's: on an H200 the driver's is far behind.
    """
    source = torch.ones(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    ways = (torch.Tensor.copy_, lambda a, b: torch.mul(b, 1.0, out=a))
    fastest = min(time_launches(way, [(target, source)] * 2).median_us for way in ways)
    return 2 * num_bytes / (fastest * 1e-6)
