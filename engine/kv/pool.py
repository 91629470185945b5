"""The KV pool's tensors: keys and values of every layer, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves in the pool, in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        heads = self.num_layers * self.num_kv_heads * self.head_dim
        return 2 * heads * self.dtype.itemsize


class KVPool:
    """Keys and values: [num_blocks, block_size, num_kv_heads, head_dim] a layer, zero at first.

    Slot ``s`` is place ``s % block_size`` of block ``s // block_size``. Raises RuntimeError, as
    torch does, where the memory is not there.
    """

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size
        sizes = (2, shape.num_layers, slots, shape.num_kv_heads, shape.head_dim)
        both = torch.zeros(sizes, dtype=shape.dtype, device=device)  # one allocation
        self._keys = list(both[0])  # a layer: [num_slots, num_kv_heads, head_dim]
        self._values = list(both[1])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, [num_slots, num_kv_heads, head_dim] each."""
        return self._keys[index], self._values[index]

    def blocks(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as blocks: [num_blocks, block_size, num_kv_heads, head_dim] each."""
        sizes = (self.num_blocks, self.block_size)
        return self._keys[index].unflatten(0, sizes), self._values[index].unflatten(0, sizes)

    def store(
        self, index: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write key and value [num_tokens, num_kv_heads, head_dim] to slots [num_tokens] int64."""
        self._keys[index].index_copy_(0, slot_mapping, key)
        self._values[index].index_copy_(0, slot_mapping, value)
