"""Kernel sections: parity with float64, cost of a launch, time against the roofline."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu.loading import launch_functions
from kiln.jit_kernels.dispatch import run_reference
from kiln.jit_kernels.launch import launch, load_kernels
from kiln.jit_kernels.parity import compare
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.spec import DTYPES, KernelSpec, label
from kiln.jit_kernels.timing import copies_for, copy_bandwidth, time_launches
from kiln.jit_kernels.triton_forms import has_triton, triton_form

Row = dict[str, Any]
_ROUNDS, _CALLS = 9, 400


def implementations(spec: KernelSpec) -> dict[str, Callable[..., None]]:
    """Return name -> function with the operator's arguments, for each way to run a spec."""
    forms: dict[str, Callable[..., None]] = {
        "jit": lambda *arguments: launch(spec, arguments),
        "torch": functools.partial(run_reference, spec),
    }
    if has_triton(spec.family):
        forms["triton"] = triton_form(spec.family, spec.name)
    return forms


def parity(args: argparse.Namespace) -> list[Row]:
    """Every variant, every size, every implementation against float64 on the device."""
    load_kernels(list(all_specs().values()), torch.device("cuda"))
    rows = []
    for spec in all_specs().values():
        for name, run in implementations(spec).items():
            for variant in spec.variants():
                worst = max(
                    (compare(spec, variant, sizes, run, "cuda") for sizes in _sizes(spec, args)),
                    key=lambda p: float("inf") if p.error != p.error else p.error,
                )
                rows.append(
                    {
                        "kernel": label(spec, variant),
                        "implementation": name,
                        "error": worst.error,
                        "allowed": worst.allowed,
                        "ok": worst.holds,
                    }
                )
    return rows


def _sizes(spec: KernelSpec, args: argparse.Namespace) -> list[Any]:
    return list(spec.sizes) + list(spec.bench_sizes[: 1 if args.quick else 4])


def launch_overhead(args: argparse.Namespace) -> list[Row]:
    """Microseconds of CPU time for one call, from Python, without waiting for the device.

    The launchers' own columns are a launch alone, on arguments packed or converted each time;
    "jit" is the operator's kernel with shapes and stream looked up, "operator" that through
    torch.ops. Rounds of all of them alternate; the median round counts.
    """
    rows = []
    for spec in all_specs().values():
        variant = next(spec.variants(spec.bench_needs))
        load_kernels([spec], torch.device("cuda"), variant)
        inputs = spec.make_inputs(variant, spec.bench_sizes[0], "cuda")
        row: Row = {"kernel": spec.name}
        calls: dict[str, Callable[[], Any]] = {}
        for name, call in launch_functions(spec, inputs).items():
            if isinstance(call, str):
                row[f"{name}_us"] = call
            else:
                calls[name] = call
        operator = getattr(torch.ops.kiln, spec.name).default
        for name, run in {**implementations(spec), "operator": operator}.items():
            calls[name] = functools.partial(run, *inputs)
        rows.append(row | {f"{name}_us": us for name, us in _call_us(calls).items()})
    return rows


def _call_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_ROUNDS + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            if number:  # the first one warms up
                rounds[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: round(statistics.median(times), 2) for name, times in rounds.items()}


def timing(args: argparse.Namespace) -> list[Row]:
    """Time of each implementation, side by side, and its share of the copy bandwidth."""
    load_kernels(list(all_specs().values()), torch.device("cuda"))
    peak = copy_bandwidth()
    rows: list[Row] = []
    for spec in all_specs().values():
        variant = next(spec.variants(spec.bench_needs))
        torch.compiler.reset()  # or the limit of recompiles turns later sizes into eager code
        compiled = torch.compile(functools.partial(run_reference, spec), dynamic=False)
        for sizes in spec.bench_sizes[: 2 if args.quick else None]:
            cost = spec.cost(variant, sizes)
            inputs = [
                spec.make_inputs(variant, sizes, "cuda") for _ in range(copies_for(cost.bytes))
            ]
            row: Row = {
                "kernel": spec.name,
                "dtype": str(DTYPES[variant["scalar_t"]]).removeprefix("torch."),
                "sizes": dict(sizes),
                "bytes": cost.bytes,
                "copy_gb_s": round(peak / 1e9, 1),
            }
            for name, run in {**implementations(spec), "compile": compiled}.items():
                measured = time_launches(run, inputs)
                row[f"{name}_us"] = round(measured.median_us, 3)
                row[f"{name}_spread_us"] = round(measured.spread_us, 3)
            row["gb_s"] = round(cost.bytes / row["jit_us"] / 1e3, 1)
            row["share_of_copy"] = round(row["gb_s"] * 1e9 / peak, 3)
            rows.append(row)
            print(f"  {row['kernel']} {row['sizes']}: {row['jit_us']} us", flush=True)
    return rows
