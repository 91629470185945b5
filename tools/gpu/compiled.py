"""Kiln's memory-bound kernels beside torch.compile's of the same reference, at every size."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch

from gpu.pace import Pace, Row, chosen
from kiln.jit_kernels.bench.ceilings import measure_ceilings
from kiln.jit_kernels.bench.forms import OWN
from kiln.jit_kernels.bench.measure import Wanted, bench_kernel
from kiln.jit_kernels.launch import load_kernels
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.spec import KernelSpec

_DEVICE = "cuda"
_FAMILIES = ("activation", "norm", "quantization", "rotary", "kv", "moe")
_FORMS = (OWN[_DEVICE], "compile")


def against_compile(args: argparse.Namespace) -> list[Row]:
    """Time both; one row a size. A ratio above 1: Kiln is faster."""
    ceilings = measure_ceilings(_DEVICE)

    def rows_of(spec: KernelSpec) -> Iterator[Row]:
        load_kernels([spec], torch.device(_DEVICE), spec.bench_needs)
        wanted = Wanted(_DEVICE, num_sizes=2 if args.quick else None, forms=_FORMS)
        # A size at a time: after some sizes of one function torch.compile would run it eagerly.
        for sizes in spec.bench_sizes[: wanted.num_sizes]:
            one = replace(spec, bench_sizes=[sizes])
            ours, compiled = bench_kernel(one, ceilings, wanted)
            yield {
                "kernel": spec.name,
                "sizes": " ".join(f"{name}={value}" for name, value in ours["sizes"].items()),
                "us": ours.get("median_us"),
                "compile_us": compiled.get("median_us"),
                "ratio": compiled.get("times_ours"),
                "status": compiled["status"],
                "ok": ours["status"] == "measured",
            }

    specs = [spec for spec in chosen(args, all_specs().values()) if spec.family in _FAMILIES]
    return Pace(args, seconds=420).rows(specs, lambda spec: spec.name, rows_of)
