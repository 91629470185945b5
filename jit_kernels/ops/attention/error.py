"""The error of paged attention against float64, in units of the unavoidable rounding error."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.attention.reference import attend

MOST_UNITS = 2.0  # the weights and the output are rounded once each
_LSE_UNIT = 5e-5
_HALF_STEP = 2.0**-31  # half of fp16's smallest step, relative to a row's largest weight


def attention_error(
    a: Arguments, wanted: Results, serves: Callable[[int], bool], *, fp16_weights: bool = False
) -> float:
    """Return the largest error of a.out and a.lse; a correct kernel has at most ``MOST_UNITS``.

    A unit is half a step of the output's dtype at 1, times sum p |v|; for lse it is 5e-5. The
    smallest fp16 weights have steps of 2^-30 of the row's largest weight, so half such a step times
    sum |v| is added to the unit. Rows of requests that are not served must equal those of
    ``wanted`` (the reference's out and lse); otherwise the error is infinite.
    """
    out, lse = a.out, a.lse
    worst = torch.zeros((), dtype=torch.float64, device=out.device)
    left_alone = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
    numbers = torch.finfo(out.dtype)
    step = _HALF_STEP / (numbers.eps / 2) if fp16_weights else 0.0
    for one in attend(a, serves, step, wide=True):
        left_alone[one.rows] = False
        unit = numbers.eps / 2 * (one.bound + numbers.tiny)
        worst = torch.maximum(worst, ((out[one.rows].double() - one.out).abs() / unit).max())
        if lse.numel():
            got = lse[one.rows].double()
            off = (got - one.lse).abs() / _LSE_UNIT
            off.masked_fill_(got == one.lse, 0.0)  # equal infinities
            worst = torch.maximum(worst, off.max())
    for got, want in ((out, wanted["out"]), (lse, wanted["lse"])):
        if got.numel() and not _same(got[left_alone], want[left_alone]):
            return float("inf")
    return float(worst)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.double(), b.double()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
