"""What the layers of a decoder have in common, and the self-attention in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.partial_sum import Sum
from kiln.engine.layers.projection_norm import ProjectionNorm
from kiln.engine.layers.query_scale import QueryScale
from kiln.engine.layers.rounding import Rounded


class Block(Protocol):
    """A layer of a decoder, on the residual stream. Each family shows what its own computes."""

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Add x to the residual in place, and return what the next layer is to add.

        positions: [num_tokens], rows of rotary tables; x, residual: [num_tokens, hidden_size]. So
        that a norm can add what it reads, each sum waits for the norm behind it.
        """


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention between its projections.

    ``norm``: over the queries, and the keys, of all heads together.
    """

    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention: AttentionLayer
    output: Linear  # [hidden_size, num_heads * head_dim]
    norm: ProjectionNorm | None = None
    query_scale: QueryScale | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if a norm of each head would undo the scale of the queries."""
        if self.query_scale is not None and self.attention.query_norm is not None:
            raise ValueError(
                f"attention layer {self.attention.index}: queries are scaled by their position "
                "before the norm of each head, which takes the scale away: want one of them"
            )

    def __call__(self, positions: torch.Tensor, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] at positions [num_tokens] to the same shape."""
        qkv = self.qkv(x)
        if self.norm is not None:
            self.norm(qkv)
        if self.query_scale is not None:
            self.query_scale(positions, qkv[:, : self.attention.shape.query_size])
        return self.output(self.attention(positions, qkv))
