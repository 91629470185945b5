"""Gated activations: what an expert computes between its two products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.mlp import GATES
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.activation.spec import CLAMPED_SWIGLU

CLAMPED = CLAMPED_SWIGLU.name


@dataclass(frozen=True, slots=True)
class Activation:
    """A gated activation by its name: a key of GATES, or CLAMPED.

    ``numbers``: of CLAMPED its alpha and its limit; the others have none.
    """

    name: str = "silu"
    numbers: tuple[float, ...] = ()

    @property
    def kernel(self) -> KernelSpec:
        """The kernel of it."""
        return CLAMPED_SWIGLU if self.name == CLAMPED else GATES[self.name]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [num_rows, 2 * size], gate first, to [num_rows, size]."""
        out = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
        self.kernel.operator(out, rows, *self.numbers)
        return out
