"""Linear projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.weight import Weight


@dataclass(frozen=True, slots=True)
class Linear:
    """x [num_rows, in] -> [num_rows, out], whatever its weights. ``bias``: [out] or None."""

    weight: Weight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return self.weight.linear(x, self.bias)
