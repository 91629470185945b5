"""Compare Kiln's memory-bound kernels with torch.compile of their references, at every size."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from gpu.pace import Pace, Row, chosen
from kiln.jit_kernels.bench.ceilings import Ceilings, measure_ceilings
from kiln.jit_kernels.bench.forms import OWN, forms_of
from kiln.jit_kernels.bench.measure import Wanted, bench_kernel, without_scales
from kiln.jit_kernels.declare.spec import KernelSpec, Sizes
from kiln.jit_kernels.launch import load_kernels
from kiln.jit_kernels.registry import all_specs

_DEVICE = "cuda"
_FAMILIES = ("activation", "norm", "quantization", "rotary", "kv", "moe")
_FORMS = (OWN[_DEVICE], "compile")


def against_compile(args: argparse.Namespace) -> list[Row]:
    """Time both; one row per size. A ratio above 1: Kiln is faster.

    torch.compile is reset for each size, because it runs eagerly after some recompiles. With
    ``ahead`` only torch.compile runs, once, to fill its cache on disk.
    """
    specs = [spec for spec in chosen(args, all_specs().values()) if spec.family in _FAMILIES]
    num_sizes = 2 if args.quick else None
    work = [(spec, sizes) for spec in specs for sizes in spec.bench_sizes[:num_sizes]]
    if args.ahead:
        return Pace(args, seconds=100).rows(work, _name, _compile)
    ceilings = measure_ceilings(_DEVICE)
    return Pace(args, seconds=240).rows(work, _name, lambda one: [_beside(*one, ceilings)])


def _name(work: tuple[KernelSpec, Sizes]) -> str:
    return work[0].name


def _beside(spec: KernelSpec, sizes: Sizes, ceilings: Ceilings) -> Row:
    load_kernels([spec], torch.device(_DEVICE), spec.bench_needs)
    wanted = Wanted(_DEVICE, forms=_FORMS)
    ours, compiled = bench_kernel(replace(spec, bench_sizes=[sizes]), ceilings, wanted)
    return {
        "kernel": spec.name,
        "sizes": " ".join(f"{name}={value}" for name, value in sizes.items()),
        "us": ours.get("median_us"),
        "compile_us": compiled.get("median_us"),
        "ratio": compiled.get("times_ours"),
        "status": compiled["status"],
        "ok": ours["status"] == "measured",
    }


def _compile(work: tuple[KernelSpec, Sizes]) -> list[Row]:
    spec, sizes = without_scales(work[0]), work[1]
    form = forms_of(spec, _DEVICE)["compile"]
    assert not isinstance(form, str), form
    form(spec.make_arguments(next(spec.variants(spec.bench_needs)), sizes, _DEVICE))()
    torch.cuda.empty_cache()  # the other processes need memory too
    return []
