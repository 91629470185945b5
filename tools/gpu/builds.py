"""Cold builds of all kernels for this GPU by this machine's NVRTC."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from gpu.pace import Row, chosen, first_line
from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import jobs_for, warm_up
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.launch import target_arch
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import nvrtc


def builds(args: argparse.Namespace) -> list[Row]:
    """Build every program without a cache; ``ok``: none failed. Other sections use a bundle."""
    arch = target_arch(torch.device("cuda", torch.cuda.current_device()))
    return [build_all(arch, chosen(args, all_specs().values()))]


def build_all(arch: str, specs: Sequence[KernelSpec]) -> Row:
    """Build all programs for a target; return their number, the seconds, and the failures."""
    jobs = jobs_for(specs, [arch])
    outcomes, seconds = warm_up(jobs, KernelCache(Store(None, mode="off")))
    failed = [f"{one.job.name}: {first_line(one.error)}" for one in outcomes if one.error]
    row: Row = {"nvrtc": nvrtc.version(), "arch": arch, "programs": len(outcomes)}
    row |= {"seconds": round(seconds, 2), "failed": len(failed)}
    return row | {"first": failed[0] if failed else "", "ok": not failed}
