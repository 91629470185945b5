"""Root mean square norms, alone and fused with the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kiln.jit_kernels.ops.norm.spec  # noqa: F401 (registers the operators)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Norm over the last dimension. ``weight`` is [d], contiguous."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., d] in a new tensor."""
        rows = x.reshape(-1, self.weight.shape[0])
        out = torch.empty_like(rows)
        torch.ops.kiln.rms_norm.default(out, rows, self.weight, self.eps, 0.0)
        return out.view(x.shape)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add x to the residual stream and leave the norm of the sum in x, both in place.

        x, residual: [rows, d], contiguous.
        """
        torch.ops.kiln.fused_add_rms_norm.default(x, residual, self.weight, self.eps, 0.0)
