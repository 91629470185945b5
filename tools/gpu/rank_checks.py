"""What real groups must do right: bits, rounds out of step, graphs, and a rank that is late."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch

import kiln.jit_kernels.ops.norm.spec  # noqa: F401 (registers the operator)
from gpu.pace import Row
from gpu.ranks import Ranks
from kiln.engine.distributed.all_reduce_plan import Plan
from kiln.engine.distributed.custom_all_reduce import CustomAllReduceV2
from kiln.engine.errors import CustomAllReduceTimeout
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig
from kiln.jit_kernels.ops.all_reduce.reference import sum_ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SIZES = (1, 7, 520, 1031, 24_576, 500_001)  # elements
_ROUNDS, _REPLAYS = 100_000, 10_000
_CALLS = 20  # in a round's graph: an even number, so that each call also meets the other phase
_SKEW_CYCLES = 20_000  # of a delay before a rank's call
_LIMIT_MS = 1500
_INTEGERS = {2: torch.int16, 4: torch.int32}


def messages(ranks: Ranks, n: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, Any]:
    """Return this rank's message [n], and the sum of all ranks': every rank draws all of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ranks.group.size, n, generator=generator).to(dtype)
    x[:, 0] = -0.0
    return x[ranks.group.rank].to(ranks.device), sum_ranks(x).to(ranks.device)


def differ(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return whether any bit differs, as a number on the device."""
    kind = _INTEGERS[found.element_size()]
    return (found.view(kind) != wanted.view(kind)).any().long()


def plan_for(ranks: Ranks, max_bytes: int) -> Plan:
    """Return a plan in which every algorithm takes messages of up to ``max_bytes``."""
    blocks = 2 if ranks.device.type == "cpu" else 16
    return Plan(ModeConfig(max_bytes), max_bytes, max_bytes=max_bytes, max_blocks=blocks)


def bits(ranks: Ranks) -> list[Row]:
    """Return a row for each algorithm and dtype: how many sizes give wrong bits on some rank."""
    sizes = _SIZES[:4] if ranks.quick else _SIZES
    kernels = ranks.kernels(*DTYPES, plan=plan_for(ranks, max(4 * max(sizes) + 16, 1 << 16)))
    rows: list[Row] = []
    for dtype in DTYPES:
        for algorithm in ALGORITHMS:
            wrong = 0
            for number, n in enumerate(sizes):
                x, want = messages(ranks, n, dtype, number)
                kept = x.clone()
                found = kernels.custom_all_reduce(x, algorithm=algorithm)
                wrong += int(differ(found, want) + differ(x, kept) > 0)
            rows.append(_agreed(ranks, {"what": algorithm, "dtype": str(dtype)[6:]}, wrong))
        rows.append(_agreed(ranks, {"what": "fused", "dtype": str(dtype)[6:]},
                            _fused_differs(kernels, ranks, dtype)))  # fmt: skip
    kernels.check()
    kernels.close()
    return rows


def _fused_differs(kernels: CustomAllReduceV2, ranks: Ranks, dtype: torch.dtype) -> int:
    wrong = 0
    forms = ((1e-5, 0.0, False), (1e-5, 1.0, False), (1e-5, 0.0, True))  # eps, offset, rounded once
    for (rows, d), factors in zip(((1, 64), (3, 60), (17, 256)), forms, strict=True):
        x = messages(ranks, rows * d, dtype, d)[0].view(rows, d)
        residual, weight = torch.ones_like(x), torch.linspace(1, 2, d, device=x.device).to(dtype)
        apart, kept = kernels.custom_all_reduce(x), residual.clone()
        torch.ops.kiln.fused_add_rms_norm.default(apart, kept, weight, *factors)
        kernels.fused_all_reduce_add_rms_norm(x, residual, weight, *factors)
        wrong += int(differ(x, apart) + differ(residual, kept) > 0)
    return wrong


def _agreed(ranks: Ranks, facts: Row, wrong: int) -> Row:
    worst = -ranks.group.minimum([-wrong])[0]
    return {"ranks": ranks.group.size, **facts, "wrong": worst, "ok": worst == 0}


def rounds(ranks: Ranks) -> list[Row]:
    """Return a row: calls with a random delay before each, most of them in replays of a graph."""
    takes_turns = ranks.group.device != ranks.device  # on one GPU, for milliseconds each
    share = 1000 if takes_turns else 100 if ranks.quick else 1
    on_gpu = ranks.device.type == "cuda"
    kernels = ranks.kernels(*DTYPES, plan=plan_for(ranks, 128 << 10))
    cases = []
    kinds = zip(cycle(ALGORITHMS), cycle(DTYPES), cycle(_SIZES[:5]), strict=False)
    for number, (algorithm, dtype, n) in enumerate(islice(kinds, _CALLS)):
        n = min(n, 1031) if not on_gpu else n
        x, want = messages(ranks, n, dtype, number)
        cases.append((x, want, torch.empty_like(x), algorithm))
    wrong = torch.zeros((), dtype=torch.long, device=ranks.device)
    delays = torch.Generator().manual_seed(ranks.group.rank)

    def once() -> None:
        for x, want, out, algorithm in cases:
            if on_gpu:
                torch.cuda._sleep(int(torch.randint(_SKEW_CYCLES, (), generator=delays)))
            out.fill_(float("nan"))
            kernels.custom_all_reduce(x, out=out, algorithm=algorithm)
            wrong.add_(differ(out, want))

    made = _repeat(ranks, kernels, once, max(_ROUNDS // _CALLS, _REPLAYS) // share)
    kernels.check()
    row = _agreed(ranks, {"rounds": made * _CALLS, "replays": made}, int(wrong))
    kernels.close()
    return [row]


def _repeat(ranks: Ranks, kernels: CustomAllReduceV2, work: Callable[[], None], times: int) -> int:
    """Do some work so often, on a GPU by replays of a graph; return how often."""
    work()
    ranks.meet()
    if ranks.device.type == "cpu":
        for _ in range(min(times, 5) - 1):
            work()
        return min(times, 5)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with kernels.capture():
            graph.capture_begin(capture_error_mode="thread_local")
            work()
            graph.capture_end()
        for number in range(times):
            kernels.before_replay()
            graph.replay()
            if number % 500 == 0:
                stream.synchronize()
    ranks.meet()
    return times + 1


def skipped(ranks: Ranks) -> list[Row]:
    """Return a row: the last rank leaves out a call, and all others name it."""
    kernels = ranks.kernels(torch.float32, watchdog_ms=_LIMIT_MS)
    x, last = torch.ones(1000, device=ranks.device), ranks.group.size - 1
    for number in range(3):
        if number < 2 or ranks.group.rank < last:
            kernels.custom_all_reduce(x)
    begun, told = time.monotonic(), ""
    if ranks.group.rank < last:
        while not told and time.monotonic() - begun < 4 * _LIMIT_MS / 1000:
            try:
                kernels.check()  # what the host's heartbeat does
            except CustomAllReduceTimeout as error:
                told = str(error)
            time.sleep(0.02)
    named = ranks.group.rank == last or f"for rank {last}" in told
    ranks.meet()
    return [_agreed(ranks, {"told": told}, int(not named))]
