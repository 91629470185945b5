"""The self-attention layer: projections, norms of query and key, rotation, paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.torch_attention import attend
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention over the KV pool."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    rotary: Rotary
    output: Linear  # [hidden_size, num_heads * head_dim]
    window: int | None

    def __call__(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] at positions [num_tokens] to the same shape."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = torch.split(heads, counts, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query = self.query_norm(query.contiguous())
            key = self.key_norm(key.contiguous())
        self.rotary(positions, query, key)
        out = attend(self.layer, query, key, value, self.head_dim**-0.5, self.window)
        return self.output(out.flatten(1))
