"""Compare the host toolchain with the GPU on the same inputs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice

import torch

from gpu.pace import NotMeasured, Pace, Row, chosen
from kiln.jit_kernels.bench.copies import copy_to
from kiln.jit_kernels.declare.errors import ToolchainMissing
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import largest_error, poisoned_inputs
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import KernelSpec, Variant, label
from kiln.jit_kernels.launch import launch, load_kernels
from kiln.jit_kernels.registry import operators
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_build import find_compiler

_VARIANTS = 2  # per kernel, because the host compiler is slow


def host_equals_gpu(args: argparse.Namespace) -> list[Row]:
    """Integers and outputs that the spec calls exact must be equal; others within two tolerances.

    Each side may have an error of one tolerance. ``bitwise`` reports results that are equal
    although that is not required. Raises NotMeasured without a C++ compiler.
    """
    try:
        find_compiler(settings().host_compiler)
    except ToolchainMissing as error:
        raise NotMeasured(str(error)) from None
    return Pace(args, seconds=60).rows(chosen(args, operators()), lambda spec: spec.name, _rows_of)


def _rows_of(spec: KernelSpec) -> Iterator[Row]:
    for variant in islice(spec.variants(spec.bench_needs), _VARIANTS):
        load_kernels([spec], torch.device("cuda"), variant)
        yield compare_sides(spec, variant, "cuda")


def compare_sides(spec: KernelSpec, variant: Variant, device: str) -> Row:
    """Run all test sizes of a variant on both sides; return the result's row."""
    allowed = 2 * spec.allowed_error(variant)
    row: Row = {"kernel": label(spec, variant), "cases": len(spec.sizes)}
    worst, bitwise = 0.0, True
    for number, sizes in enumerate(spec.sizes):
        torch.manual_seed(number)
        here = poisoned_inputs(spec, variant, sizes, "cpu")
        there = copy_to(here, device)
        host.run(spec, here, env=settings())
        if device == "cuda":
            launch(spec, there)
            torch.cuda.synchronize()
        else:
            host.run(spec, there, seed=1, env=settings())
        names = spec.parameters.results
        results = [(getattr(here, name), getattr(there, name).cpu()) for name in names]
        bitwise &= all(_same_bits(a, b) for a, b in results)
        difference = _difference(spec, here, copy_to(there, "cpu"))
        if not difference <= worst:  # also true for a NaN
            worst = difference
        if not worst <= allowed:
            row["sizes"] = dict(sizes)
            break
    found = {"bitwise": bitwise, "difference": worst, "allowed": allowed}
    return row | found | {"ok": worst <= allowed}


def _difference(spec: KernelSpec, here: Arguments, there: Arguments) -> float:
    """Return the largest difference: infinite if integers differ, else by the spec's measure."""
    wanted = {name: getattr(here, name) for name in spec.parameters.results}
    pairs = [(getattr(there, name), want) for name, want in wanted.items()]
    whole = [(got, want) for got, want in pairs if not got.dtype.is_floating_point]
    if not spec.any_order and any(not torch.equal(got, want) for got, want in whole):
        return float("inf")
    if spec.error is not None:
        return spec.error(there, wanted)
    errors = [0.0 if _same_bits(got, want) else largest_error(got, want) for got, want in pairs]
    return max(errors, default=0.0) if not any(e != e for e in errors) else float("nan")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaNs included."""
    as_bytes = (x.contiguous().flatten().view(torch.uint8) for x in (a, b) if x.numel())
    return a.shape == b.shape and torch.equal(*as_bytes) if a.numel() else a.shape == b.shape
