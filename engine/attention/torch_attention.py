"""Paged attention in torch, on any device: decode rows together, prefill chunks one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kiln.engine.attention.context import AttentionContext
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.plan import AttentionPlan, DecodeGroup, PrefillChunk, plan_attention
from kiln.engine.attention.workspace import Workspace
from kiln.engine.kv.pool import KVPool


class TorchAttention:
    """Planned on the host once a step, for each window in use."""

    def __init__(self, windows: Iterable[int | None], dtype: torch.dtype) -> None:
        self._windows, self._dtype = sorted(set(windows), key=str), dtype
        self._workspace = Workspace(dtype)

    def context(self, metadata: AttentionMetadata, pool: KVPool) -> AttentionContext:
        """Plan a step."""
        plans = {window: plan_attention(metadata, window, self._dtype) for window in self._windows}
        return AttentionContext(metadata, pool, TorchStep(pool, plans, self._workspace))


@dataclass(frozen=True, slots=True)
class TorchStep:
    """A step with a plan for each window in use."""

    pool: KVPool
    plans: Mapping[int | None, AttentionPlan]
    workspace: Workspace

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return every token's causal attention: decode rows together, chunks one by one."""
        keys, values = self.pool.layer(layer)
        plan, gather = self.plans[window], self.workspace.gather
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
