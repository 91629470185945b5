"""Paged attention in torch, on any device: decode requests batched, prefill chunks one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.plan import AttentionPlan, DecodeGroup, PrefillChunk, plan_attention
from kiln.engine.attention.softmax import Softmax
from kiln.engine.kv.pool import KVPool
from kiln.engine.kv.shape import Window

WindowPlans = Mapping[Window | None, AttentionPlan]  # one for each window in use


class Workspace:
    """Two buffers that attention gathers keys and values into. It computes in ``dtype``.

    They grow to the largest gather so far. New memory costs a CPU one page fault per 4 KiB, several
    times the cost of the gather. Layers run one after the other, so they share one pair.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def gather(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the slots' keys and values, [num_slots, num_kv_heads, head_dim] each.

        The next call overwrites them.
        """
        if keys.dtype != self._dtype:  # 8-bit floats: torch can gather them only as bytes
            keys, values = (
                pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(self._dtype)
                for pool in (keys, values)
            )
            return keys, values
        count = slots.shape[0]
        if count > self._keys.shape[0]:
            self._keys = keys.new_empty((count, *keys.shape[1:]))
            self._values = values.new_empty((count, *values.shape[1:]))
        return (
            torch.index_select(keys, 0, slots, out=self._keys[:count]),
            torch.index_select(values, 0, slots, out=self._values[:count]),
        )


class TorchAttention:
    """Attention planned on the host once per step and window. ``dtype`` is the model's."""

    def __init__(self, windows: Iterable[Window | None], dtype: torch.dtype) -> None:
        self._windows, self._dtype = sorted(set(windows), key=str), dtype
        self._workspace = Workspace(dtype)

    def plan(self, metadata: AttentionMetadata) -> WindowPlans:
        """Plan a step."""
        if not metadata.kv_lens:
            metadata = replace(metadata, kv_lens=tuple(metadata.seq_lens.tolist()))
        return {window: plan_attention(metadata, window, self._dtype) for window in self._windows}

    def bind(self, layer: AttentionLayer, pool: KVPool, dtype: torch.dtype) -> TorchAttend:
        """Return a layer's attention. Raises IndexError if the pool is laid out by head."""
        softmax = Softmax(layer.softmax_scale * layer.k_scale, layer.soft_cap, layer.sinks)
        pools, window = pool.layer(layer.index), layer.window
        return TorchAttend(*pools, softmax, layer.v_scale, window, self._workspace)


@dataclass(frozen=True, slots=True)
class TorchAttend:
    """One layer's attention: decode requests batched, prefill chunks one by one."""

    keys: torch.Tensor  # [num_slots, num_kv_heads, head_dim]
    values: torch.Tensor
    softmax: Softmax
    v_scale: float  # of the output
    window: Window | None
    workspace: Workspace

    def __call__(self, plans: WindowPlans, query: torch.Tensor, out: torch.Tensor) -> None:
        """Write every token's causal attention to out; both [num_tokens, num_heads, head_dim]."""
        self._attend(plans[self.window], query, out)
        if self.v_scale != 1.0:
            out.mul_(self.v_scale)

    def _attend(self, plan: AttentionPlan, query: torch.Tensor, out: torch.Tensor) -> None:
        if plan.is_one_group:
            group = plan.groups[0]
            out.copy_(_decode(group, query, *self._gather(group.slots), self.softmax))
            return
        for group in plan.groups:
            rows = query.index_select(0, group.tokens)
            result = _decode(group, rows, *self._gather(group.slots), self.softmax)
            out.index_copy_(0, group.tokens, result)
        for chunk in plan.chunks:
            rows = query[chunk.first : chunk.last]
            result = _prefill(chunk, rows, *self._gather(chunk.slots), self.softmax)
            out[chunk.first : chunk.last] = result

    def _gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.workspace.gather(self.keys, self.values, slots)


def _decode(
    group: DecodeGroup,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Attend with one query per row; query heads of one KV head are laid out as query positions.

    query: [num_rows, num_heads, head_dim]; keys, values: [num_rows * length, num_kv_heads,
    head_dim].
    """
    num_rows, num_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    sizes = (num_rows, group.length, kv_heads, head_dim)
    keys, values = (pool.view(sizes).transpose(1, 2) for pool in (keys, values))
    if not softmax.is_plain:
        return softmax.attend(query.unsqueeze(2), keys, values, group.mask).squeeze(2)
    out = F.scaled_dot_product_attention(
        query.reshape(num_rows, kv_heads, num_heads // kv_heads, head_dim),
        keys,
        values,
        attn_mask=group.mask,
        scale=softmax.scale,
    )
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(
    chunk: PrefillChunk,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Attend with a chunk of one request to its prefix and itself.

    query: [num_tokens, num_heads, head_dim]; keys, values: [num_keys, num_kv_heads, head_dim].
    """
    query, keys, values = (one.transpose(0, 1).unsqueeze(0) for one in (query, keys, values))
    if softmax.is_plain:
        out = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=softmax.scale,
            enable_gqa=True,
        )
    else:
        out = softmax.attend(query, keys, values, chunk.mask)
    return out.squeeze(0).transpose(0, 1)
