"""The shape of a model's attention, shared by the layers, the KV pool and the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Which keys a token attends to: the last ``size``, itself included.

    ``chunked``: those of its own chunk instead, up to itself. Chunks of ``size`` tokens begin at
    multiples of ``size``.
    """

    size: int
    chunked: bool = False


def window_number(window: Window | None) -> int:
    """Return a window as the kernels take it: its size, minus that of a chunk, 0 for None."""
    if window is None:
        return 0
    return -window.size if window.chunked else window.size


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and windows. ``windows`` has one entry per layer; None: a token attends to all keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[Window | None, ...]

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
