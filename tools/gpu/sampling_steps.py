"""Time of sampling steps over many random batches, because a few slow rows determine it.

If a row's approximate sum does not decide its cutoff, its block makes further passes, and the step
takes as long as that block. A benchmark of one batch may or may not contain such a row.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from gpu.pace import Pace, Row
from kiln.jit_kernels.bench.copies import copies_of
from kiln.jit_kernels.bench.timing import GpuWork, time_side_by_side
from kiln.jit_kernels.declare.spec import KernelSpec, Sizes, Variant
from kiln.jit_kernels.launch import launch, load_kernels
from kiln.jit_kernels.registry import find_spec

_BATCHES = 40
_COPIES = 4  # of a batch's 32 MiB of logits, used in turn: more than the caches hold
_ROUNDS = 5
_BAR = 25  # microseconds; the goal for a step of 128 rows
_TITLES = {  # by setting, whether a mask hides tokens, and edits a row
    (1, 0, 0): "greedy",
    (2, 0, 0): "temperature",
    (3, 0, 0): "top-p",
    (4, 0, 0): "top-k and top-p",
    (5, 0, 0): "20 likely tokens",
    (6, 0, 0): "top-p of thousands of tokens",
    (3, 1, 0): "top-p under a mask",
    (3, 1, 64): "top-p under a mask, 64 tokens edited",
}


def sampling_steps(args: argparse.Namespace) -> list[Row]:
    """Return quantiles over batches for each setting of the benchmarks, at the largest size."""
    spec = find_spec("sample_tokens")
    variant = next(spec.variants(spec.bench_needs))
    load_kernels([spec], torch.device("cuda"), variant)
    rows = max(sizes["rows"] for sizes in spec.bench_sizes)
    cases = [sizes for sizes in spec.bench_sizes if sizes["rows"] == rows]
    batches = _BATCHES // 10 if args.quick else _BATCHES

    def rows_of(sizes: Sizes) -> list[Row]:
        times = [_step_us(spec, variant, sizes, seed) for seed in range(batches)]
        row = {"kernel": spec.name, "setting": _title(sizes), "rows": rows}
        return [row | quantiles(times)]

    return Pace(args, seconds=60).rows(cases, _title, rows_of)


def quantiles(times: Sequence[float]) -> dict[str, Any]:
    """Return quantiles of the times of some batches, in microseconds."""
    return {
        "batches": len(times),
        "median_us": round(statistics.median(times), 2),
        "nine_of_ten_us": round(sorted(times)[math.ceil(0.9 * len(times)) - 1], 2),
        "slowest_us": round(max(times), 2),
        f"over_{_BAR}_us": sum(us > _BAR for us in times),
    }


def _title(sizes: Sizes) -> str:
    return _TITLES[sizes["serve"], sizes["hides"], sizes["edits"]]


def _step_us(spec: KernelSpec, variant: Variant, sizes: Sizes, seed: int) -> float:
    torch.manual_seed(seed)
    copies = copies_of(spec.make_arguments(variant, sizes, "cuda"), _COPIES)
    work = GpuWork([lambda one=one: launch(spec, one) for one in copies])
    times = time_side_by_side({"step": work}, min_rounds=_ROUNDS, max_rounds=_ROUNDS)
    return times["step"].median_us
