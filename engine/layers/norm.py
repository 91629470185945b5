"""Root mean square norms, alone and fused with the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Norm over the last dimension. ``weight`` is [d]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., d]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add x to the residual stream and leave the norm of the sum in x, both in place."""
        fused_add_rms_norm(x, residual, self.weight, self.eps)
