"""Check every form of a kernel against its reference, then time the forms side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kiln.jit_kernels.bench.ceilings import Ceilings, work_on
from kiln.jit_kernels.bench.copies import bytes_held, copies_of, is_cold, num_copies
from kiln.jit_kernels.bench.forms import OWN, Form, forms_of
from kiln.jit_kernels.bench.limits import time_limit
from kiln.jit_kernels.bench.peer_sampling import Drawn
from kiln.jit_kernels.bench.timing import Timing, Work, time_side_by_side
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import compare
from kiln.jit_kernels.declare.spec import Cost, KernelSpec, Sizes, Variant, label
from kiln.jit_kernels.implementations import run_reference

Row = dict[str, Any]
_CPU_ROUNDS = 3
_FORM_SECONDS = 30  # limit for the compile and first run of a form


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure: "cuda" or "cpu", which forms of a kernel, and how many sizes.

    ``compiled``: whether to measure torch.compile, which takes seconds per size. ``forms``: the
    names of the forms to measure, including Kiln's own; None: all.
    """

    device: str = "cuda"
    compiled: bool = True
    peers: bool = False
    num_sizes: int | None = None
    forms: Sequence[str] | None = None


def bench_kernel(
    spec: KernelSpec,
    ceilings: Ceilings,
    wanted: Wanted,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """Yield one row for each benchmark size and form of a kernel.

    A row has kernel, family, variant, sizes, implementation, status, and if the status is
    "measured": median_us, spread_us, fastest_us, rounds, outliers, captured, cold, bytes, flops,
    bound, gb_s, tflop_s, floor_us, share_of_floor, and times_ours (the speedup of Kiln's own
    kernel). Any other status is the reason why there is no number. ``tell`` is called with the
    next step.
    """
    spec = without_scales(spec)
    variant = next(spec.variants(spec.bench_needs), None)
    if variant is None:
        yield _row(spec, {}, {}, OWN[wanted.device]) | {"status": f"no {dict(spec.bench_needs)}"}
        return
    every = forms_of(spec, wanted.device, compiled=wanted.compiled, peers=wanted.peers)
    forms = {
        name: form for name, form in every.items() if wanted.forms is None or name in wanted.forms
    }
    cases = _cases(spec, variant, wanted)
    for name, form in forms.items():
        if not isinstance(form, str):
            tell(f"{label(spec, variant)}: checking {name}")
            forms[name] = _flaw(spec, variant, cases[0], form, wanted.device) or form
    for sizes in cases:
        tell(f"{label(spec, variant)} {' '.join(f'{k}={v}' for k, v in sizes.items())}")
        yield from _bench_case(spec, variant, sizes, forms, ceilings, wanted.device)


def without_scales(spec: KernelSpec) -> KernelSpec:
    """Return a spec whose inputs have KV scales of 1, because other libraries lack them.

    The kernels multiply by the scales in any case, so this does not change their time.
    """
    scales = dict.fromkeys({"k_scale", "v_scale"}.intersection(spec.parameters.names), 1.0)

    def make_inputs(variant: Variant, sizes: Sizes, device: str) -> Mapping[str, Any]:
        return {**spec.make_inputs(variant, sizes, device), **scales}

    return replace(spec, make_inputs=make_inputs) if scales else spec


def _cases(spec: KernelSpec, variant: Variant, wanted: Wanted) -> list[Sizes]:
    """Return the sizes to measure; on a CPU the tests' largest, because the host form is slow."""
    if wanted.device == "cpu":
        return [max(spec.sizes, key=lambda sizes: spec.cost(variant, sizes).bytes)]
    return list(spec.bench_sizes[: wanted.num_sizes])


def _flaw(spec: KernelSpec, variant: Variant, sizes: Sizes, form: Form, device: str) -> str | None:
    """Return why a form must not be timed (it fails, or its result is wrong), or None."""

    def run(a: Arguments) -> None:
        result = form(a)()
        if not isinstance(result, torch.Tensor | Drawn):
            return
        # Some peers return only the first result, or tokens drawn with their own random numbers.
        own = result.clone() if isinstance(result, torch.Tensor) else None  # it may be the output
        run_reference(spec, a)
        if own is not None:
            first = getattr(a, spec.parameters.results[0])
            first.copy_(own.view(first.shape))
        elif isinstance(result, Drawn):
            result.check()

    try:
        with time_limit(_FORM_SECONDS):
            parity = compare(spec, variant, sizes, run, device)
    except Exception as error:  # from torch, Triton or a peer; the row reports it
        return f"failed: {_first_line(error)}"
    if parity.holds:
        return None
    return f"wrong result: error {parity.error:.3g}, tolerance {parity.allowed:.3g}"


def _bench_case(
    spec: KernelSpec,
    variant: Variant,
    sizes: Sizes,
    forms: Mapping[str, Form | str],
    ceilings: Ceilings,
    device: str,
) -> Iterator[Row]:
    cost = spec.cost(variant, sizes)
    first = spec.make_arguments(variant, sizes, device)
    count = 1
    if device == "cuda":
        count = num_copies(cost.bytes, bytes_held(first), ceilings.l2_bytes, _free_bytes())
    copies = copies_of(first, count)
    works: dict[str, Work] = {}
    status: dict[str, str] = {}
    for name, form in forms.items():
        if isinstance(form, str):
            status[name] = form
            continue
        try:
            with time_limit(_FORM_SECONDS):
                works[name] = work_on(device)([form(a) for a in copies])
        except Exception as error:  # as above
            status[name] = f"failed: {_first_line(error)}"
    time = partial(time_side_by_side, min_rounds=_CPU_ROUNDS, max_rounds=_CPU_ROUNDS)
    times = time_side_by_side(works) if device == "cuda" else time(works)
    ours = times.get(OWN[device])
    cold = is_cold(count, cost.bytes, ceilings.l2_bytes)
    for name in forms:
        row = _row(spec, variant, sizes, name)
        if name in times:
            yield row | {"status": "measured"} | _numbers(times[name], ours, cost, ceilings, cold)
        else:
            yield row | {"status": status[name]}


def _free_bytes() -> int:
    """Return the GPU's free memory plus the unused part of torch's caching allocator."""
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + kept


def _row(spec: KernelSpec, variant: Variant, sizes: Sizes, implementation: str) -> Row:
    return {
        "kernel": spec.name,
        "family": spec.family,
        "variant": dict(variant),
        "sizes": dict(sizes),
        "implementation": implementation,
    }


def _numbers(
    timing: Timing, ours: Timing | None, cost: Cost, ceilings: Ceilings, cold: bool
) -> Row:
    seconds, floor = timing.median_us * 1e-6, ceilings.floor_us(cost)
    return {
        "median_us": round(timing.median_us, 3),
        "spread_us": round(timing.spread_us, 3),
        "fastest_us": round(timing.fastest_us, 3),
        "rounds": timing.rounds,
        "outliers": timing.outliers,
        "captured": timing.captured,
        "cold": cold,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "bound": ceilings.bound(cost),
        "gb_s": round(cost.bytes / seconds / 1e9, 2),
        "tflop_s": round(cost.flops / seconds / 1e12, 4),
        "floor_us": round(floor, 4),
        "share_of_floor": round(floor / timing.median_us, 4),
        "times_ours": None if ours is None else round(timing.median_us / ours.median_us, 3),
    }


def _first_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
