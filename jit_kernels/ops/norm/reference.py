"""The root mean square norm in torch, with the rounding of transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results


def normalise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> torch.Tensor:
    """Return the norm of x [rows, d] times (weight_offset + weight [d]).

    Rounds like LlamaRMSNorm; with an offset, like GemmaRMSNorm. Source: transformers
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight + weight_offset, eps)
    normal = F.rms_norm(x.float(), weight.shape, None, eps)
    if weight_offset:
        return (normal * (weight_offset + weight.float())).to(x.dtype)
    return normal.to(x.dtype) * weight


def rms_norm_reference(a: Arguments) -> Results:
    """[rows, d], [d] -> [rows, d]."""
    return {"out": normalise(a.x, a.weight, a.eps, a.weight_offset)}


def fused_reference(a: Arguments) -> Results:
    """[rows, d], [rows, d], [d] -> the new x and residual, [rows, d] each."""
    total = a.x + a.residual
    return {"x": normalise(total, a.weight, a.eps, a.weight_offset), "residual": total}
