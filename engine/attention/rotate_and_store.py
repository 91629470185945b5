"""From the qkv projection to attention: norms, rotation, and the store to the KV pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.kv.pool import KVPool
from kiln.jit_kernels.ops.kv import is_one_launch
from kiln.jit_kernels.references.kv import check_pool, check_slots

RotateAndStore = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""(positions, slots, query, key, value) -> the query, normalised and rotated.

positions, slots: [num_tokens] int64; query: [num_tokens, num_heads, head_dim]; key, value:
[num_tokens, num_kv_heads, head_dim]. Query and key may be overwritten.
"""


def choose_store(layer: AttentionLayer, pool: KVPool, dtype: torch.dtype) -> RotateAndStore:
    """Return one launch where there is a kernel for the layer's sizes, else an operation a part.

    Both give the same numbers. Raises ValueError and TypeError where the kernel cannot write such
    a pool.
    """
    keys, values = pool.views(layer.index)
    rotary_dim = layer.rotary.table.shape[1]
    if not is_one_launch(keys.device.type, dtype, keys.dtype, keys.shape[-1], rotary_dim):
        return SeparateOperations(layer, pool)
    for name, view in (("key_pool", keys), ("value_pool", values)):
        check_pool(name, view, dtype, 1.0)
    check_slots(pool.num_blocks, pool.block_size)
    return OneLaunch(layer, keys, values)


@dataclass(frozen=True, slots=True)
class OneLaunch:
    """All of it in one launch of rope_store."""

    layer: AttentionLayer
    keys: torch.Tensor
    values: torch.Tensor

    def __call__(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Overwrite the query and return it; the key in qkv stays as it was."""
        norms = self.layer.query_norm, self.layer.key_norm
        weights = (None if norm is None else norm.weight for norm in norms)
        eps = 0.0 if norms[0] is None else norms[0].eps
        torch.ops.kiln.rope_store.default(
            query, self.keys, self.values, query, key, value, positions, self.layer.rotary.table,
            slots, *weights, eps, 1.0, 1.0,
        )  # fmt: skip
        return query


@dataclass(frozen=True, slots=True)
class SeparateOperations:
    """An operation for each part."""

    layer: AttentionLayer
    pool: KVPool

    def __call__(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return the query, in qkv or, where there are norms, in memory of its own."""
        layer = self.layer
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        layer.rotary(positions, query, key)
        self.pool.store(layer.index, slots, key, value)
        return query
