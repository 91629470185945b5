"""How much the GPU does in a decode step or in a whole run, measured by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kiln.engine.bench.engine import Adapters, BenchError
from kiln.engine.core import EngineCore
from kiln.engine.requests.request import NewRequest, TokenOutput
from kiln.engine.requests.sampling_params import SamplingParams

_WARM_UP_STEPS = 2  # their profile is dropped: the first profiler starts slowly


def device_work(
    core: EngineCore,
    prompts: list[list[int]],
    skipped: int,
    steps: int,
    adapters: Adapters = None,
) -> dict[str, float | None]:
    """Return what the GPU does per step, both None if the profiler recorded nothing.

    ``device_ms``: the milliseconds in which it runs at least one kernel or copy.
    ``device_launches``: the number of kernels and copies. All requests run at once, with these
    adapters. The profiled steps begin when each request has ``skipped`` output tokens. Raises
    BenchError if a request fails.
    """
    names = adapters or [None] * len(prompts)
    # The first requests decode while the other prompts run, and must not finish during the profile.
    prefill_steps = sum(map(len, prompts)) // core.config.scheduler.budget + 1
    length = skipped + _WARM_UP_STEPS + steps + 2 * prefill_steps
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    waiting = {f"profiled-{index}": skipped for index in range(len(prompts))}
    requests = list(waiting)
    try:
        for request_id, prompt, adapter in zip(requests, prompts, names, strict=True):
            core.add(NewRequest(request_id, prompt, params, adapter))
        while waiting:
            for output in core.step():
                _count(waiting, output)
        _profiled(core, _WARM_UP_STEPS)
        spans = _profiled(core, steps)
    finally:
        for request_id in requests:
            core.abort(request_id)
        while core.has_work:  # a step that was launched ahead
            core.step()
    if not spans:
        return {"device_ms": None, "device_launches": None}
    return {
        "device_ms": union_length(spans) / 1000 / steps,
        "device_launches": len(spans) / steps,
    }


def busy_ms(work: Callable[[], object]) -> float | None:
    """Do some work; return the milliseconds in which the GPU runs at least one kernel or copy.

    None if the profiler recorded nothing.
    """
    spans = _spans_during(work)
    return union_length(spans) / 1000 if spans else None


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end).

    Kernels overlap if one is launched before the previous one has ended.
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _count(waiting: dict[str, int], output: TokenOutput) -> None:
    """Subtract a request's new tokens, and remove it when none is missing. Raises BenchError."""
    if output.finish_reason is not None:
        raise BenchError(f"a request ended early: {output.message or output.finish_reason}")
    if output.request_id in waiting:
        waiting[output.request_id] -= len(output.token_ids)
        if waiting[output.request_id] <= 0:
            del waiting[output.request_id]


def _profiled(core: EngineCore, steps: int) -> list[tuple[float, float]]:
    return _spans_during(lambda: [core.step() for _ in range(steps)])


def _spans_during(work: Callable[[], object]) -> list[tuple[float, float]]:
    """Do some work; return (start, end) in microseconds of each kernel and copy on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return device_spans(profiler.events() or ())


def device_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return (start, end) in microseconds of those events of a profile that ran on the GPU.

    The range of a user's annotation also covers the time between its kernels, so it is left out.
    """
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
