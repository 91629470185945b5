"""The shape of a model's attention, shared by the layers, the KV pool and the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and windows. ``windows`` has one entry per layer.

    A window is how many keys a token attends to, itself included; None: all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        """The number of attention layers."""
        return len(self.windows)

    @property
    def query_size(self) -> int:
        """Elements of one token's query, or attention output, in a layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's key, or value, in a layer."""
        return self.num_kv_heads * self.head_dim
