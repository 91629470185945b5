"""The time of a call that all ranks make: on a GPU inside a captured graph, as it is used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from kiln.engine.distributed.sum_kernels import SumKernels

_CALLS, _REPLAYS, _TRIALS = 20, 20, 5
_HOST_CALLS, _HOST_TRIALS = 3, 3


def nanoseconds_of(
    call: Callable[[], object], device: torch.device, kernels: SumKernels | None
) -> int:
    """Return the median time of a call on this rank. ``kernels``: those that it uses, if any."""
    if device.type == "cpu":
        return _on_cpu(call)
    with torch.cuda.device(device):
        return _on_gpu(call, kernels)


def _on_cpu(call: Callable[[], object]) -> int:
    call()
    trials = []
    for _ in range(_HOST_TRIALS):
        begun = time.perf_counter_ns()
        for _ in range(_HOST_CALLS):
            call()
        trials.append((time.perf_counter_ns() - begun) / _HOST_CALLS)
    return int(statistics.median(trials))


def _on_gpu(call: Callable[[], object], kernels: SumKernels | None) -> int:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with nullcontext() if kernels is None else kernels.capture():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(_CALLS):
                    call()
            finally:
                graph.capture_end()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        trials = []
        for _ in range(_TRIALS):
            if kernels is not None:
                kernels.before_replay()
            graph.replay()  # the ranks begin together only behind the first one
            begin.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            trials.append(begin.elapsed_time(end) * 1e6 / (_CALLS * _REPLAYS))
    return int(statistics.median(trials))
