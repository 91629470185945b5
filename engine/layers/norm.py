"""Root mean square norms, alone and fused with the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kiln.engine.layers.partial_sum import PartialSum, Sum
from kiln.engine.layers.rounding import Rounded, Rounding
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.norm.spec import FUSED_ADD_RMS_NORM, RMS_NORM


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Norm over the last dimension, times ``weight_offset`` + ``weight`` [d], contiguous.

    With ``round_once``, or an offset, the normalised row is not rounded before it is multiplied.
    """

    weight: torch.Tensor
    eps: float
    weight_offset: float = 0.0
    round_once: bool = False
    kernels: ClassVar[tuple[KernelSpec, ...]] = (RMS_NORM,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., d] in a new tensor."""
        rows = x.reshape(-1, self.weight.shape[0])
        out = torch.empty_like(rows)
        torch.ops.kiln.rms_norm.default(
            out, rows, self.weight, self.eps, self.weight_offset, self.round_once
        )
        return out.view(x.shape)

    @property
    def form(self) -> dict[str, float]:
        """What the norm computes beside its weight, by the operators' names."""
        return {
            "eps": self.eps, "weight_offset": self.weight_offset, "round_once": self.round_once
        }  # fmt: skip


def check_same_form(name: str, query: RMSNorm, key: RMSNorm) -> None:
    """Raise ValueError, with a layer's name, if the norms of queries and keys differ in form."""
    if query.form != key.form:
        raise ValueError(
            f"{name}: the norm of queries has {query.form}, that of keys {key.form}: want the same"
        )


@dataclass(frozen=True, slots=True)
class StreamNorm:
    """Norm of the residual stream, to which it first adds what the layer before returned.

    ``weight_offset`` and ``round_once`` as in RMSNorm.
    """

    weight: torch.Tensor
    eps: float
    weight_offset: float = 0.0
    round_once: bool = False
    kernels: ClassVar[tuple[KernelSpec, ...]] = (FUSED_ADD_RMS_NORM,)

    def __call__(self, x: Sum, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual in place, and return the norm of the sum in the memory of x.

        x, residual: [num_tokens, hidden_size], contiguous. A partial sum is summed over the ranks
        first: one operator, so that sum, residual and norm can be one kernel.
        """
        factors = (self.weight, self.eps, self.weight_offset, self.round_once)
        if isinstance(x, PartialSum):
            torch.ops.kiln.sum_and_add_rms_norm.default(x.values, residual, *factors, x.group)
            return x.values
        torch.ops.kiln.fused_add_rms_norm.default(x, residual, *factors)
        return x


@dataclass(frozen=True, slots=True)
class RoundedStreamNorm:
    """A StreamNorm that only one layer reads, rounded as that layer wants it."""

    norm: StreamNorm
    rounding: Rounding

    def __call__(self, x: Sum, residual: torch.Tensor) -> Rounded:
        """Add x to the residual in place, and return the codes of the norm of the sum."""
        if isinstance(x, PartialSum):
            return self.rounding.of(self.norm(x, residual))
        form = self.norm.eps, self.norm.weight_offset, self.norm.round_once
        return self.rounding.of_norm(x, residual, self.norm.weight, *form)
