"""The tensors of the KV pool: keys and values of every layer, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.kv.shape import AttentionShape
from kiln.engine.kv.zeros import zeros
from kiln.jit_kernels.ops.kv.reference import narrowed


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape and dtype of one token's keys and values, over all layers."""

    attention: AttentionShape
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in the pool: keys and values over all layers, and its id."""
        keys = self.attention.num_layers * self.attention.kv_size * self.dtype.itemsize
        return 2 * keys + torch.int32.itemsize


class KVPool:
    """Keys and values of every layer in blocks of tokens, initially zero.

    Slot ``s`` is position ``s % block_size`` of block ``s // block_size``. By default the heads of
    a slot are contiguous, for torch's gathers. With ``by_head`` the tokens of a head in a block are
    contiguous, keys next to values, so kernels read long runs. ``token_ids`` int32 [num_slots] are
    the tokens in the slots. ``planes`` uint8 [num_planes, num_blocks, num_bytes] is the memory of
    keys and values: a block is one run of it in each plane. ``token_bytes`` uint8 [num_blocks,
    num_bytes] is that of the tokens. Raises torch's RuntimeError if memory runs out.
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
        self.token_ids = torch.zeros(num_blocks * block_size, dtype=torch.int32, device=device)
        self.token_bytes = self.token_ids.view(torch.uint8).view(num_blocks, -1)
        both = zeros(sizes, shape.dtype, device)  # one allocation
        runs = both if by_head else both.flatten(0, 1)
        self.planes = runs.flatten(2).view(torch.uint8)
        if by_head:
            self._views = [(layer[:, 0], layer[:, 1]) for layer in both]
            self._layers = []
        else:
            self._views = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in both]
            self._layers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in both]

    def views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each.

        Only the last dimension is contiguous.
        """
        return self._views[index]

    def blocks(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as [num_blocks, block_size, num_kv_heads, head_dim] each."""
        keys, values = self._views[index]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as slots, [num_slots, num_kv_heads, head_dim] each.

        Raises IndexError if the pool is laid out by head: no such view exists.
        """
        return self._layers[index]

    def store(
        self,
        index: int,
        slot_mapping: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write key and value [num_tokens, num_kv_heads, head_dim] to slots [num_tokens] int64.

        A pool of 8-bit floats gets key / k_scale and value / v_scale, rounded to nearest; they
        saturate at ±448.
        """
        keys, values = self._views[index] if self.by_head else self.layer(index)
        if keys.dtype == torch.float8_e4m3fn:  # torch cannot index-copy these floats, only bytes
            key = narrowed(key, k_scale).view(torch.uint8)
            value = narrowed(value, v_scale).view(torch.uint8)
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        if not self.by_head:
            keys.index_copy_(0, slot_mapping, key)
            values.index_copy_(0, slot_mapping, value)
            return
        blocks, places = slot_mapping // self.block_size, slot_mapping % self.block_size
        keys[blocks, :, places] = key
        values[blocks, :, places] = value
