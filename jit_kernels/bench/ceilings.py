"""Measured roofline ceilings of a device: memory bandwidth, matmul rate, launch time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kiln.jit_kernels.bench.timing import Call, CpuWork, GpuWork, Work, time_side_by_side
from kiln.jit_kernels.declare.spec import Cost

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
_MATMUL_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates measured on a device, and the time of the smallest launch.

    Units: bytes read plus written per second, operations per second, microseconds, bytes.
    """

    copy_bytes_s: float
    matmul_flops_s: float
    launch_us: float
    l2_bytes: int

    def floor_us(self, cost: Cost) -> float:
        """Return the roofline's minimum time of a cost, in microseconds."""
        return max(cost.bytes / self.copy_bytes_s, cost.flops / self.matmul_flops_s) * 1e6

    def bound(self, cost: Cost) -> str:
        """Return the limiting ceiling: "memory" or "compute"."""
        by_memory = cost.bytes / self.copy_bytes_s >= cost.flops / self.matmul_flops_s
        return "memory" if by_memory else "compute"


def work_on(device: str) -> Callable[[Sequence[Call]], Work]:
    """Return the class that times calls on a device."""
    return GpuWork if device == "cuda" else CpuWork


def measure_ceilings(device: str) -> Ceilings:
    """Measure a device, "cuda" or "cpu". This also brings its clocks up.

    The bandwidth is the better of a driver copy and a kernel; on an H200 the copy is far slower.
    The matmul is torch's, of random matrices (zeros would run faster): bf16 on a GPU, float32 on a
    CPU. The smallest launch writes one element.
    """
    num_bytes, size = _COPY_BYTES[device], _MATMUL_SIZE[device]
    source = torch.randn(num_bytes // 4, device=device)
    target, one = torch.empty_like(source), torch.zeros(1, device=device)
    a, b = (torch.randn(size, size, device=device).to(_MATMUL_DTYPE[device]) for _ in range(2))
    product = torch.empty_like(a)
    calls: dict[str, list[Call]] = {
        "copy": [lambda: target.copy_(source)] * 2,
        "multiply": [lambda: torch.mul(source, 1.0, out=target)] * 2,
        "matmul": [lambda: torch.mm(a, b, out=product)],
        "launch": [lambda: one.fill_(1.0)] * 64,
    }
    make = work_on(device)
    times = time_side_by_side({name: make(some) for name, some in calls.items()})
    copy_us = min(times[name].median_us for name in ("copy", "multiply"))
    return Ceilings(
        copy_bytes_s=2 * num_bytes / (copy_us * 1e-6),
        matmul_flops_s=2 * size**3 / (times["matmul"].median_us * 1e-6),
        launch_us=times["launch"].median_us,
        l2_bytes=_l2_bytes(device),
    )


def _l2_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.get_device_properties("cuda").L2_cache_size)
    return 0
