"""The way of a step's queries, keys and values from their projection to attention."""

from __future__ import annotations

import torch

from kiln.engine.attention.context import current
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary
from kiln.jit_kernels.ops.kv.functions import is_one_launch, rope_store


def rotate_and_store(
    layer: int,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotary: Rotary,
    query_norm: RMSNorm | None,
    key_norm: RMSNorm | None,
) -> torch.Tensor:
    """Norm and rotate query and key, put key and value in the layer's KV pool, return the query.

    positions: [num_tokens]; query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens,
    num_kv_heads, head_dim]. One launch where the choice for the family ``kv`` has a kernel for
    these sizes, else an operation for each part; the same numbers either way. Query and key may be
    overwritten.
    """
    context = current()
    slots, pools = context.metadata.slot_mapping, context.pool.views(layer)
    kinds = (query.device.type, query.dtype, pools[0].dtype)
    if is_one_launch(*kinds, query.shape[-1], rotary.table.shape[1]):
        return rope_store(
            query,
            key,
            value,
            positions,
            rotary.table,
            slots,
            *pools,
            query_weight=query_norm.weight if query_norm is not None else None,
            key_weight=key_norm.weight if key_norm is not None else None,
            eps=query_norm.eps if query_norm is not None else 0.0,
        )
    if query_norm is not None and key_norm is not None:
        query, key = query_norm(query.contiguous()), key_norm(key.contiguous())
    rotary(positions, query, key)
    context.pool.store(layer, slots, key, value)
    return query
