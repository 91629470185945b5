"""Root mean square norms, alone and fused with the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kiln.engine.layers.partial_sum import PartialSum, Sum
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.norm.spec import FUSED_ADD_RMS_NORM, RMS_NORM


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Norm over the last dimension. ``weight`` is [d], contiguous."""

    weight: torch.Tensor
    eps: float
    kernels: ClassVar[tuple[KernelSpec, ...]] = (RMS_NORM,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., d] in a new tensor."""
        rows = x.reshape(-1, self.weight.shape[0])
        out = torch.empty_like(rows)
        torch.ops.kiln.rms_norm.default(out, rows, self.weight, self.eps, 0.0)
        return out.view(x.shape)


@dataclass(frozen=True, slots=True)
class StreamNorm:
    """Norm of the residual stream, to which it first adds what the layer before returned."""

    weight: torch.Tensor
    eps: float
    kernels: ClassVar[tuple[KernelSpec, ...]] = (FUSED_ADD_RMS_NORM,)

    def __call__(self, x: Sum, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual in place, and return the norm of the sum in the memory of x.

        x, residual: [num_tokens, hidden_size], contiguous. A partial sum is summed over the ranks
        first: one operator, so that sum, residual and norm can be one kernel.
        """
        if isinstance(x, PartialSum):
            values = x.values
            torch.ops.kiln.sum_and_add_rms_norm.default(
                values, residual, self.weight, self.eps, x.group
            )
            return values
        torch.ops.kiln.fused_add_rms_norm.default(x, residual, self.weight, self.eps, 0.0)
        return x
