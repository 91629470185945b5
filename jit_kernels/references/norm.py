"""The root mean square norm in torch, rounded as transformers does."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def normalise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> torch.Tensor:
    """Return the norm of x [rows, d] times (weight_offset + weight [d]).

    As LlamaRMSNorm, or as GemmaRMSNorm where there is an offset. Source: transformers
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight + weight_offset, eps)
    normal = F.rms_norm(x.float(), weight.shape, None, eps)
    if weight_offset:
        return (normal * (weight_offset + weight.float())).to(x.dtype)
    return normal.to(x.dtype) * weight
