"""The sizes of a model's attention: one value for the layers, the KV pool and the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and windows. ``windows`` has an entry a layer.

    A window is how many keys a token sees, itself included; None: all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        """How many layers attend."""
        return len(self.windows)

    @property
    def query_size(self) -> int:
        """Elements of one token's query in a layer; its output has as many."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's key in a layer; its value has as many."""
        return self.num_kv_heads * self.head_dim
