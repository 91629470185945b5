"""The self-attention layer: QKV projection, attention over the KV pool, output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention between its projections."""

    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention: AttentionLayer
    output: Linear  # [hidden_size, num_heads * head_dim]

    def __call__(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] at positions [num_tokens] to the same shape."""
        return self.output(self.attention(positions, self.qkv(x)))
