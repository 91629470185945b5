"""Compare any implementation of a kernel with its reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kiln.jit_kernels.spec import KernelSpec, Sizes, Variant


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest error of one case, relative to max(|expected|, 1), and what is allowed."""

    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the error is within bounds; a NaN is not."""
        return self.error <= self.allowed


def poisoned_inputs(
    spec: KernelSpec, variant: Variant, sizes: Sizes, device: str
) -> tuple[Any, ...]:
    """Return fresh arguments of the operator whose pure outputs hold NaN.

    An output that is never written then shows as an error, whatever memory held before.
    """
    arguments = spec.make_inputs(variant, sizes, device)
    for name, value in zip(spec.argument_names, arguments, strict=True):
        if name in spec.mutates and name.startswith("out"):
            poison(value)
    return arguments


def expected(spec: KernelSpec, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return the reference's results in float64 for the arguments as they are now."""
    wide = [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments
    ]
    return spec.reference(*wide)


def compare(
    spec: KernelSpec,
    variant: Variant,
    sizes: Sizes,
    run: Callable[..., None],
    device: str = "cpu",
) -> Parity:
    """Run an implementation on fresh random inputs and measure it against float64."""
    arguments = poisoned_inputs(spec, variant, sizes, device)
    wanted = expected(spec, arguments)
    run(*arguments)
    return error_of(spec, variant, arguments, wanted)


def error_of(
    spec: KernelSpec,
    variant: Variant,
    arguments: tuple[Any, ...],
    wanted: tuple[torch.Tensor, ...],
) -> Parity:
    """Measure the arguments that an implementation has written against what was expected."""
    allowed = spec.allowed_error(variant)
    if spec.error is not None:
        return Parity(spec.error(arguments, wanted), allowed)
    named = dict(zip(spec.argument_names, arguments, strict=True))
    worst = 0.0
    for name, want in zip(spec.results, wanted, strict=True):
        largest = largest_error(named[name], want)
        worst = largest if largest != largest else max(worst, largest)
        if worst != worst:
            break
    return Parity(worst, allowed)


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest error relative to max(|want|, 1); infinite where integers differ.

    Equal infinities agree; a NaN on either side gives NaN.
    """
    if got.numel() == 0:
        return 0.0
    if not got.dtype.is_floating_point:
        return 0.0 if torch.equal(got.to(want.dtype), want) else float("inf")
    got, want = got.double(), want.double()
    error = (got - want).abs() / want.abs().clamp(min=1)
    return float(error.masked_fill_(got == want, 0.0).max())  # max of NaN is NaN


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with what no kernel writes: NaN, or the lowest integer."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
