"""Sums over ranks in torch, for launches that run all ranks of a group."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.errors import NoSuchKernel
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.norm.reference import normalise


def sum_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x [ranks, ...] over the ranks, in their order, in float32, rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    total = wide[0]
    for row in wide[1:]:
        total = total + row
    return total.to(x.dtype)


def all_reduce_reference(a: Arguments) -> Results:
    """[ranks, n] -> [ranks, n], equal rows. Raises NoSuchKernel if some ranks run elsewhere."""
    return {"out": _everywhere(a)}


def fused_reference(a: Arguments) -> Results:
    """[ranks, rows, d] and weight [d] -> the norms and the new residuals, [ranks, rows, d] each."""
    total = _everywhere(a) + a.residual
    return {"out": normalise(total, a.weight, a), "residual": total}


def _everywhere(a: Arguments) -> torch.Tensor:
    if len(a.x) != a.peers.numel():
        raise NoSuchKernel(
            f"torch's form of an all-reduce adds up all ranks of one launch; here are {len(a.x)} "
            f"of {a.peers.numel()}: use torch.distributed"
        )
    return sum_ranks(a.x).expand_as(a.x).contiguous()
