"""The KV pool's tensors: keys and values of every layer, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.kv.shape import AttentionShape
from kiln.jit_kernels.references.kv import narrowed


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves in the pool, in every layer."""

    attention: AttentionShape
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.attention.num_layers * self.attention.kv_size * self.dtype.itemsize


class KVPool:
    """Keys and values of blocks of tokens in every layer, zero at first.

    Slot ``s`` is place ``s % block_size`` of block ``s // block_size``. Laid out by token, a slot's
    heads lie together, which torch's gathers want; ``by_head``, a head's tokens of a block do, and
    its keys beside its values, which a kernel reads in long runs. Raises RuntimeError, as torch
    does, where the memory is not there.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        by_head: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.by_head = by_head
        layers, head_dim = shape.attention.num_layers, shape.attention.head_dim
        heads = shape.attention.num_kv_heads
        if by_head:
            sizes = (layers, num_blocks, 2, heads, block_size, head_dim)
        else:
            sizes = (layers, 2, num_blocks, block_size, heads, head_dim)
        both = torch.zeros(sizes, dtype=shape.dtype, device=device)  # one allocation
        if by_head:
            self._views = [(layer[:, 0], layer[:, 1]) for layer in both]
            self._layers = []
        else:
            self._views = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in both]
            self._layers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in both]

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each.

        Strided, but for the last dimension.
        """
        return self._views[index]

    def blocks(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as [num_blocks, block_size, num_kv_heads, head_dim] each."""
        keys, values = self._views[index]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as slots, [num_slots, num_kv_heads, head_dim] each.

        Raises IndexError where the pool is laid out by head: there is no such view.
        """
        return self._layers[index]

    def store(
        self, index: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write key and value [num_tokens, num_kv_heads, head_dim] to slots [num_tokens] int64.

        A pool of 8-bit floats takes the nearest number of at most 448 in size.
        """
        keys, values = self._views[index] if self.by_head else self.layer(index)
        if keys.dtype == torch.float8_e4m3fn:  # torch moves bytes where it does not such floats
            key, value = narrowed(key).view(torch.uint8), narrowed(value).view(torch.uint8)
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        if not self.by_head:
            keys.index_copy_(0, slot_mapping, key)
            values.index_copy_(0, slot_mapping, value)
            return
        blocks, places = slot_mapping // self.block_size, slot_mapping % self.block_size
        keys[blocks, :, places] = key
        values[blocks, :, places] = value
