"""The root mean square norm in torch, with the rounding of transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.norm.factors import rounds_once


def normalise(x: torch.Tensor, weight: torch.Tensor, a: Arguments) -> torch.Tensor:
    """Return the norm of x [rows, d] times (a.weight_offset + weight [d]).

    Rounds like LlamaRMSNorm, or once: like Olmo2RMSNorm, and GemmaRMSNorm with its offset. Source:
    transformers
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight + a.weight_offset, a.eps)
    normal = F.rms_norm(x.float(), weight.shape, None, a.eps)
    if rounds_once(a):
        normal *= a.weight_offset + weight.float()
        return normal.to(x.dtype)
    return normal.to(x.dtype) * weight


def rms_norm_reference(a: Arguments) -> Results:
    """[rows, d], [d] -> [rows, d]."""
    return {"out": normalise(a.x, a.weight, a)}


def fused_reference(a: Arguments) -> Results:
    """[rows, d], [rows, d], [d] -> the new x and residual, [rows, d] each."""
    total = a.x + a.residual
    return {"x": normalise(total, a.weight, a), "residual": total}
