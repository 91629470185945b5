"""Measure which algorithm sums a message fastest, and from where on torch's is faster.

Every rank calls it at the same time with the same arguments. Bits are verified before anything is
timed, and times are those of the slowest rank, so that all ranks come to the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch

import kiln.jit_kernels.ops.norm.spec  # noqa: F401 (registers the operator)
from kiln.engine.distributed.all_reduce_plan import GPU_BLOCKS, HOST_BLOCKS, Plan
from kiln.engine.distributed.group import Group
from kiln.engine.distributed.prove_sums import expected, message
from kiln.engine.distributed.sum_kernels import SumKernels
from kiln.engine.distributed.timing import nanoseconds_of
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig

SIZES = tuple(1 << power for power in range(10, 25))  # 1 KB to 16 MB
FEW_SIZES = (1 << 10, 1 << 14)  # on a CPU, where times say little
_GPU_BLOCKS = (16, 32, GPU_BLOCKS, 128)
_MOST_PUSHED = 32 << 20  # bytes of all ranks' messages; beyond, pushing has long been slower
_SWITCH = math.log(1.03)  # the gain that one more algorithm must bring
_HIDDEN = 4096  # of the rows that the fused kernel is timed on
_FACTORS = (
    1e-5,
    0.0,
    False,
)  # eps, weight_offset and round_once of its norm, of no effect on times

Make = Callable[[Plan], SumKernels]
Times = dict[str, dict[int, int]]  # algorithm, or "torch" -> bytes -> nanoseconds


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured plan, and the measurements: rows of bytes, blocks, algorithm and microseconds."""

    plan: Plan
    rows: tuple[dict[str, Any], ...]


def measure(
    make: Make,
    group: Group,
    device: torch.device,
    *,
    sizes: Sequence[int],
    dtype: torch.dtype,
    most_blocks: int,
) -> Tuned:
    """Return the fastest plan for messages of some sizes in bytes.

    ``make`` returns kernels for a plan. Raises ConfigError if they cannot run, or sum wrongly.
    """
    sizes = sorted(set(sizes))
    at_once = max((size for size in sizes if size * group.size <= _MOST_PUSHED), default=sizes[0])
    wanted = _GPU_BLOCKS if device.type == "cuda" else (1, HOST_BLOCKS)
    timer = _Timer(group, device, dtype, [])
    found: list[tuple[float, Plan]] = []
    torchs = timer.torch_times(sizes)
    for blocks in sorted({min(blocks, most_blocks) for blocks in wanted}):
        widest = Plan(ModeConfig(at_once), at_once, max_bytes=sizes[-1], max_blocks=blocks)
        kernels = make(widest)
        try:
            times = timer.kernel_times(kernels, sizes, widest)
            cost, plan = best_plan({**times, "torch": torchs}, sizes, widest)
            fused = timer.fused_threshold(kernels, plan)
            found.append((cost, replace(plan, fused_threshold=fused)))
        finally:
            kernels.close()
    _, plan = min(found, key=lambda one: one[0])
    return Tuned(plan, tuple(timer.rows))


def best_plan(times: Times, sizes: Sequence[int], widest: Plan) -> tuple[float, Plan]:
    """Return the plan with the least mean of logarithms of times, and that mean.

    Each algorithm has one range of sizes, in the order in which ModeConfig tries them; torch has
    those above, and all if the plan's ``max_bytes`` is 0. ``times`` without an entry: the algorithm
    cannot take that size. Raises ConfigError if nothing can take one.
    """
    order = [*ALGORITHMS, *(("torch",) if times.get("torch") else ())]
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for cuts in combinations_with_replacement(range(len(sizes) + 1), len(order) - 1):
        cost, edges = 0.0, (0, *cuts, len(sizes))
        for name, begin, end in zip(order, edges, edges[1:], strict=False):
            cost += _SWITCH * (end > begin)
            cost += sum(_log_time(times, name, size) for size in sizes[begin:end])
        best = min(best, (cost, cuts))
    cost, cuts = best
    limits = [0, *(sizes[cut - 1] if cut else 0 for cut in cuts)]
    one_shot_push, two_shot_push, one_shot_pull = limits[1:4]
    largest = limits[4] if "torch" in order else widest.max_bytes
    if math.isinf(cost):
        raise ConfigError(f"no all-reduce can sum messages of all of these sizes: {list(sizes)}")
    modes = ModeConfig(one_shot_push, two_shot_push, one_shot_pull, measured=True)
    return cost / len(sizes), replace(widest, modes=modes, max_bytes=largest)


def _log_time(times: Times, name: str, size: int) -> float:
    return math.log(times[name][size]) if size in times.get(name, {}) else math.inf


@dataclass(frozen=True, slots=True)
class _Timer:
    """Times sums of messages of a dtype on all ranks, and keeps them in ``rows``; see Tuned."""

    group: Group
    device: torch.device
    dtype: torch.dtype
    rows: list[dict[str, Any]]

    def kernel_times(self, kernels: SumKernels, sizes: Sequence[int], plan: Plan) -> Times:
        """Return the times of the algorithms whose buffers hold a message."""
        group, layout, times = self.group, plan.layout(self.group.size), Times()
        for size in sizes:
            content = (size // self.dtype.itemsize, 0, self.dtype, self.device)
            x = message(group.rank, *content)
            want, out = expected(group.size, *content), torch.empty_like(x)
            for algorithm in ALGORITHMS:
                if size > layout.limit(algorithm):
                    continue
                out.fill_(float("nan"))
                call = partial(kernels.custom_all_reduce, x, out=out, algorithm=algorithm)
                call()
                if not group.minimum([torch.equal(out, want)])[0]:
                    raise ConfigError(f"{algorithm} gives wrong sums of {size} bytes: not measured")
                times.setdefault(algorithm, {})[size] = self._slowest(call, kernels)
        self._keep(times, plan.max_blocks)
        return times

    def torch_times(self, sizes: Sequence[int]) -> dict[int, int]:
        """Return NCCL's or gloo's times; nothing if the group's exchanges are on another device."""
        if self.group.device != self.device:
            return {}
        found = {}
        for size in sizes:
            x = torch.zeros(size // self.dtype.itemsize, dtype=self.dtype, device=self.device)
            found[size] = self._slowest(partial(self.group.all_reduce_by_torch, x))
        self._keep({"torch": found}, 0)
        return found

    def fused_threshold(self, kernels: SumKernels, plan: Plan) -> int:
        """Return the largest message up to which the fused kernel is faster than the two apart."""
        hidden = _HIDDEN if self.device.type == "cuda" else 64
        weight = torch.ones(hidden, dtype=self.dtype, device=self.device)
        threshold, count = 0, 1
        while True:
            x = torch.zeros(count, hidden, dtype=self.dtype, device=self.device)
            residual, size = torch.zeros_like(x), x.nbytes
            algorithm = plan.algorithm_for(size)
            if not kernels.should_fuse(x) or algorithm is None:
                return threshold
            summed = partial(kernels.fused_all_reduce_add_rms_norm, x, residual, weight, *_FACTORS)
            fused = self._slowest(summed, kernels)
            apart = self._slowest(partial(_apart, kernels, x, residual, weight, algorithm), kernels)
            self._keep({"fused": {size: fused}, "apart": {size: apart}}, plan.max_blocks)
            if fused > apart:
                return threshold
            threshold, count = size, 2 * count

    def _slowest(self, call: Callable[[], object], kernels: SumKernels | None = None) -> int:
        """Return the nanoseconds of a call on the slowest rank, at least 1."""
        self.group.minimum([0])  # all begin at the same time
        own = nanoseconds_of(call, self.device, kernels)
        if kernels is not None:
            kernels.check()
        return max(1, -self.group.minimum([-own])[0])

    def _keep(self, times: Times, blocks: int) -> None:
        self.rows.extend(
            {"bytes": size, "blocks": blocks, "algorithm": name, "us": round(time / 1000, 3)}
            for name, own in times.items()
            for size, time in own.items()
        )


def _apart(kernels: SumKernels, x: Any, residual: Any, weight: Any, algorithm: Any) -> None:
    kernels.custom_all_reduce(x, out=x, algorithm=algorithm)
    torch.ops.kiln.fused_add_rms_norm.default(x, residual, weight, *_FACTORS)
