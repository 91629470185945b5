"""One layer of a decoder, and the self-attention in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GatedMLP
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.sparse_mlp import SparseMLP


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention between its projections."""

    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention: AttentionLayer
    output: Linear  # [hidden_size, num_heads * head_dim]

    def __call__(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] at positions [num_tokens] to the same shape."""
        return self.output(self.attention(positions, self.qkv(x)))


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
