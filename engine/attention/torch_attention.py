"""Paged attention in torch, on any device: decode rows together, prefill chunks one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kiln.engine.attention.context import current
from kiln.engine.attention.plan import DecodeGroup, PrefillChunk


def attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Store the step's keys and values, and return every token's causal attention.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim];
    returns [num_tokens, num_heads, head_dim]. ``window`` is how many keys a token sees, itself
    included; None: all. A row's result depends on its own request's slots alone.
    """
    context = current()
    context.pool.store(layer, context.metadata.slot_mapping, key, value)
    keys, values = context.pool.layer(layer)
    plan, gather = context.plans[window], context.workspace.gather
    if plan.is_one_group:
        group = plan.groups[0]
        return _decode(group, query, *gather(keys, values, group.slots), scale)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in plan.groups:
        rows = query.index_select(0, group.tokens)
        result = _decode(group, rows, *gather(keys, values, group.slots), scale)
        out.index_copy_(0, group.tokens, result)
    for chunk in plan.chunks:
        rows = query[chunk.first : chunk.last]
        result = _prefill(chunk, rows, *gather(keys, values, chunk.slots), scale)
        out[chunk.first : chunk.last] = result
    return out


def _decode(
    group: DecodeGroup,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query a row: the heads that share a KV head stand in for query positions.

    query: [num_rows, num_heads, head_dim]; keys, values: [num_rows * length, num_kv_heads,
    head_dim].
    """
    num_rows, num_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    sizes = (num_rows, group.length, kv_heads, head_dim)
    out = F.scaled_dot_product_attention(
        query.reshape(num_rows, kv_heads, num_heads // kv_heads, head_dim),
        keys.view(sizes).transpose(1, 2),
        values.view(sizes).transpose(1, 2),
        attn_mask=group.mask,
        scale=scale,
    )
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(
    chunk: PrefillChunk,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Several queries of one request over its prefix and themselves.

    query: [num_tokens, num_heads, head_dim]; keys, values: [num_keys, num_kv_heads, head_dim].
    """
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
