"""Kernel sections: error against float64, launch overhead, time against the roofline."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Literal, get_args

import torch

from gpu.loading import launch_functions
from gpu.pace import Pace, chosen, first_line
from kiln.jit_kernels.bench.ceilings import measure_ceilings
from kiln.jit_kernels.bench.copies import bytes_held
from kiln.jit_kernels.bench.forms import OWN, Form, forms_of
from kiln.jit_kernels.bench.measure import Wanted, bench_kernel
from kiln.jit_kernels.check.schedules import covering_variants
from kiln.jit_kernels.declare.parity import Parity, compare
from kiln.jit_kernels.declare.spec import KernelSpec, Sizes, Variant, label
from kiln.jit_kernels.launch import load_kernels
from kiln.jit_kernels.registry import is_in_triton, operators

Row = dict[str, Any]
_Turn = Literal["own", "first", "rest"]
DEVICE = "cuda"
_CHOICES = ("jit", "host", "torch", "triton")
_ROUNDS, _CALLS, _ROUND_SECONDS = 9, 400, 0.02
_LAST_SHARE = 1.1  # share of the time after which a started kernel is abandoned
_LARGE_SHARE = 0.6  # share of the time after which only the smallest benchmark size is checked
_WIDE_BYTES = 2 << 30  # largest float64 copy of a call's tensors; larger sizes are skipped


def implementations(spec: KernelSpec) -> dict[str, Form]:
    """Return name -> form for each available choice of the toggle of a spec."""
    forms = forms_of(spec, DEVICE, compiled=False)
    return {
        name: form for name, form in forms.items() if name in _CHOICES and not isinstance(form, str)
    }


def parity(args: argparse.Namespace) -> list[Row]:
    """Compare every variant, size and implementation with float64 on the device.

    Runs all test sizes, and benchmark sizes if time and memory for their float64 reference allow
    it. Triton and torch run only the first of those: the point is Kiln's kernels.
    """
    pace = Pace(args, seconds=150)

    def rows_of(work: tuple[KernelSpec, _Turn]) -> Iterator[Row]:
        spec, turn = work
        load_kernels([spec], torch.device(DEVICE))
        few = args.quick or turn != "own" or pace.used() > _LARGE_SHARE
        for name, form in implementations(spec).items():
            if (name == OWN[DEVICE]) != (turn == "own"):
                continue
            for variant in _variants(spec, turn):
                if name == "triton" and not is_in_triton(spec, variant):
                    continue
                yield _parity_row(spec, variant, name, form, 1 if few else 4)

    # Kiln's own first: Triton compiles for seconds, and torch loops over requests. For those two,
    # one variant of each kernel before the other variants.
    work = [
        (spec, turn) for turn in get_args(_Turn) for spec in chosen(args, operators())
        if _variants(spec, turn)
    ]  # fmt: skip
    return pace.rows(work, lambda one: one[0].name, rows_of)


def _variants(spec: KernelSpec, turn: _Turn) -> list[Variant]:
    if turn == "own":
        return list(spec.variants())
    variants = list(covering_variants(spec))
    return variants[:1] if turn == "first" else variants[1:]


def _parity_row(spec: KernelSpec, variant: Variant, name: str, form: Form, large: int) -> Row:
    row: Row = {"kernel": label(spec, variant), "implementation": name}
    benched = spec.bench_sizes[:large]
    worst, cases, left_out = Parity(0.0, spec.allowed_error(variant)), 0, 0
    for sizes in [*spec.sizes, *benched]:
        try:
            found = _compare(spec, variant, sizes, form)
        except torch.cuda.OutOfMemoryError:
            found = None
        except Exception as error:  # this row fails; the others are still measured
            failed = f"{first_line(error)} at {dict(sizes)}"
            return row | {"error": failed, "allowed": worst.allowed, "ok": False}
        if found is None:
            left_out += 1
            continue
        cases += 1
        if not found.error <= worst.error:  # also true for a NaN
            worst = found
        if not found.holds:
            row["sizes"] = dict(sizes)
            break
    numbers = {"error": worst.error, "allowed": worst.allowed, "cases": cases}
    return row | numbers | {"left_out": left_out, "ok": worst.holds and cases > 0}


def _compare(spec: KernelSpec, variant: Variant, sizes: Sizes, form: Form) -> Parity | None:
    """Return the error of one case, or None if its reference needs too much memory."""
    if spec.cost(variant, sizes).bytes * 4 > _WIDE_BYTES:
        return None
    if bytes_held(spec.make_arguments(variant, sizes, DEVICE)) * 4 > 4 * _WIDE_BYTES:
        return None
    return compare(spec, variant, sizes, lambda a: form(a)(), DEVICE)


def launch_overhead(args: argparse.Namespace) -> list[Row]:
    """Microseconds of CPU time for one call, from Python, without waiting for the device.

    The launchers' columns time only a launch, including packing or converting the arguments. "jit"
    adds the lookup of the kernel, shapes and stream; "operator" adds torch.ops. Rounds of all
    alternate; the result is the median round.
    """
    return Pace(args, seconds=40).rows(chosen(args, operators()), _name, _launch_rows)


def _launch_rows(spec: KernelSpec) -> list[Row]:
    variant = next(spec.variants(spec.bench_needs))
    load_kernels([spec], torch.device(DEVICE), variant)
    inputs = spec.make_arguments(variant, spec.bench_sizes[0], DEVICE)
    row: Row = {"kernel": spec.name}
    calls: dict[str, Callable[[], Any]] = {}
    for name, call in launch_functions(spec, inputs).items():
        if isinstance(call, str):
            row[f"{name}_us"] = call
        else:
            calls[name] = call
    for name, form in implementations(spec).items():
        calls[name] = form(inputs)
    operator = getattr(torch.ops.kiln, spec.name).default
    calls["operator"] = functools.partial(operator, *inputs)
    return [row | {f"{name}_us": us for name, us in _call_us(calls).items()}]


def _call_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    times = {name: _how_often(call) for name, call in calls.items()}
    for number in range(_ROUNDS + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(times[name]):
                call()
            if number:  # the first round is a warm-up
                rounds[name].append((time.perf_counter() - start) / times[name] * 1e6)
    torch.cuda.synchronize()
    return {name: round(statistics.median(values), 2) for name, values in rounds.items()}


def _how_often(call: Callable[[], Any]) -> int:
    """Return the number of calls per round: fewer for a slow call, such as a torch reference."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return max(3, min(_CALLS, int(_ROUND_SECONDS / (time.perf_counter() - start))))


def timing(args: argparse.Namespace) -> list[Row]:
    """Measure what ``kiln bench kernels`` does: one row per kernel, size and implementation.

    The first row is the machine's ceilings. torch.compile takes seconds per size and has its own
    section.
    """
    pace = Pace(args, seconds=170)
    ceilings = measure_ceilings(DEVICE)
    print(f"  {ceilings}", flush=True)

    def rows_of(spec: KernelSpec) -> Iterator[Row]:
        load_kernels([spec], torch.device(DEVICE), spec.bench_needs)
        wanted = Wanted(DEVICE, compiled=False, num_sizes=2 if args.quick else None)
        for row in bench_kernel(spec, ceilings, wanted):
            ours = row["implementation"] == OWN[DEVICE]
            yield row | {"ok": row["status"] == "measured"} if ours else row
            if pace.used() > _LAST_SHARE:
                yield {
                    "kernel": spec.name,
                    "status": "not measured: no time for further sizes",
                }
                return

    rows = pace.rows(chosen(args, operators()), _name, rows_of)
    return [{"ceilings": asdict(ceilings)}, *rows]


def _name(spec: KernelSpec) -> str:
    return spec.name
