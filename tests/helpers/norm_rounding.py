"""Scenarios for planted faults that round a norm at another point: a difference in the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import needs_of
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.template import Unit

_FEW = 0.02  # of the results: the sums of a kernel and of torch have another order


def rounds_elsewhere(
    unit_of: Callable[..., Unit], kernels: Sequence[str], seed: int, *, sizes: Mapping[str, int]
) -> str | None:
    """Return how many of a bf16 kernel's results are not those of the reference in bf16."""
    spec = find_spec(kernels[0])
    variant = next(spec.variants(needs_of(torch.bfloat16)))
    a = spec.make_arguments(variant, sizes, "cpu")
    name = spec.parameters.results[0]
    want = spec.reference(a)[name].clone()
    unit = unit_of(spec, variant)
    built = host.build(unit, spec.entry, spec.c_types, name=spec.name, checked=True, env=settings())
    host.launch(built, spec, a, seed=seed)
    differ = (getattr(a, name) != want).float().mean().item()
    return f"{differ:.0%} of {name} differ" if differ > _FEW else None
