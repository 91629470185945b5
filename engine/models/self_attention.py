"""The self-attention layer: projections, norms of query and key, rotation, paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.context import attend
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary
from kiln.engine.layers.rotate_and_store import rotate_and_store


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
        query = rotate_and_store(
            self.layer, positions, query, key, value, self.rotary, self.query_norm, self.key_norm
        )
        out = attend(self.layer, query, self.head_dim**-0.5, self.window)
        return self.output(out.flatten(1))
