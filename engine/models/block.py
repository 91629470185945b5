"""One layer of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.mlp import GatedMLP
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.sparse_mlp import SparseMLP
from kiln.engine.models.self_attention import SelfAttention


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Attention and MLP, each after a norm, on the residual stream."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP | SparseMLP

    def __call__(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Add x to the residual in place, and return the MLP's output, to be added next.

        positions: [num_tokens]; x, residual: [num_tokens, hidden_size].
        """
        self.attention_norm.add(x, residual)
        x = self.attention(positions, x)
        self.mlp_norm.add(x, residual)
        return self.mlp(x)
