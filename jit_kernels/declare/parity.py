"""Compare an implementation of a kernel with its reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import KernelSpec, Results, Sizes, Variant


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest error of one case, relative to max(|expected|, 1), and its tolerance."""

    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.allowed


def poisoned_inputs(spec: KernelSpec, variant: Variant, sizes: Sizes, device: str) -> Arguments:
    """Return fresh operator arguments whose outputs hold NaN.

    An output that the kernel does not write then shows as an error.
    """
    a = spec.make_arguments(variant, sizes, device)
    for name in spec.parameters.outputs:
        poison(getattr(a, name))
    return a


def expected(spec: KernelSpec, a: Arguments) -> Results:
    """Return the reference's results in float64 for the current arguments."""
    wide = [
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in a
    ]
    return spec.reference(spec.arguments(wide))


def compare(
    spec: KernelSpec,
    variant: Variant,
    sizes: Sizes,
    run: Callable[[Arguments], object],
    device: str = "cpu",
) -> Parity:
    """Run an implementation on fresh random inputs and measure its error against float64."""
    a = poisoned_inputs(spec, variant, sizes, device)
    wanted = expected(spec, a)
    run(a)
    return error_of(spec, variant, a, wanted)


def error_of(spec: KernelSpec, variant: Variant, a: Arguments, wanted: Results) -> Parity:
    """Measure the error of the outputs that an implementation has written."""
    allowed = spec.allowed_error(variant)
    if spec.error is not None:
        return Parity(spec.error(a, wanted), allowed)
    worst = 0.0
    for name in spec.parameters.results:
        largest = largest_error(getattr(a, name), wanted[name])
        worst = largest if largest != largest else max(worst, largest)
        if worst != worst:
            break
    return Parity(worst, allowed)


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest error relative to max(|want|, 1); infinite if integers differ.

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
    """Fill a tensor with a value that no kernel writes: NaN, or the lowest integer."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
