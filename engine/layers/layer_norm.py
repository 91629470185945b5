"""Layer norms, which subtract the mean: alone, and of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kiln.engine.layers.partial_sum import Sum, total


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm over the last dimension, times ``weight_offset`` + ``weight`` [d], plus ``bias``.

    It is computed in float32 and rounded once. As in transformers, the sum of weight and offset has
    the weight's dtype. Source: Cohere2LayerNorm, and NemotronLayerNorm1P with its offset of 1
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    weight_offset: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., d] in a new tensor."""
        weight = self.weight + self.weight_offset if self.weight_offset else self.weight
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class StreamLayerNorm:
    """Layer norm of the residual stream, to which it first adds what the layer before returned."""

    norm: LayerNorm

    def __call__(self, x: Sum, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual in place, and return the norm of the sum.

        x, residual: [num_tokens, hidden_size]. A partial sum is summed over the ranks first.
        """
        return self.norm(residual.add_(total(x)))
