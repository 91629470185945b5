"""Paged attention by Kiln's kernels: one for requests with few new tokens, one for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.jit_kernels.attention.checks import check_attention
from kiln.jit_kernels.attention.reference import Paged
from kiln.jit_kernels.attention.splits import KV_BLOCK, MOST_TOKENS
from kiln.jit_kernels.attention.tiles import PrefillWorkspace, make_prefill_workspace
from kiln.jit_kernels.attention.workspace import Workspace, make_workspace
from kiln.jit_kernels.ops.attention_decode import plan_attention
from kiln.jit_kernels.ops.attention_prefill import plan_prefill

_PLAIN = (0.0, 1.0, 1.0)  # no soft cap, keys and values unscaled


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step there can be."""

    max_requests: int
    max_tokens: int  # of all requests
    max_length: int  # tokens in the pool of one request


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """A planned step, and which of the kernels have requests in it."""

    metadata: AttentionMetadata
    decodes: bool
    prefills: bool


class KernelAttention:
    """The memory that the kernels work in, which is taken before the KV pool is sized."""

    def __init__(self, shape: KVShape, limits: Limits, device: torch.device) -> None:
        heads = shape.attention
        windows = sorted({window or 0 for window in heads.windows})
        self._decode = make_workspace(
            max_requests=limits.max_requests,
            max_tokens=limits.max_tokens,
            max_blocks=-(-limits.max_length // KV_BLOCK),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            kv_dtype=shape.dtype,
            device=device,
            windows=windows,
        )
        self._prefill = make_prefill_workspace(
            max_requests=limits.max_requests,
            max_tokens=limits.max_tokens,
            group=heads.num_heads // heads.num_kv_heads,
            device=device,
            windows=windows,
        )

    def plan(self, metadata: AttentionMetadata) -> KernelPlan:
        """Queue the plans of a step; the host only looks at which kernels have work.

        Raises ValueError, with the numbers, when the step could need more than the workspaces have.
        """
        decodes = any(count <= MOST_TOKENS for count in metadata.query_lens)
        prefills = any(count > MOST_TOKENS for count in metadata.query_lens)
        num_tokens = sum(metadata.query_lens)
        lengths = (metadata.seq_lens, metadata.cu_seqlens_q, num_tokens)
        if decodes:
            plan_attention(self._decode, metadata.block_table, *lengths)
        if prefills:
            plan_prefill(self._prefill, *lengths)
        return KernelPlan(metadata, decodes, prefills)

    def bind(self, layer: AttentionLayer, pool: KVPool, dtype: torch.dtype) -> KernelAttend:
        """Return a layer's attention. Raises ValueError and TypeError on a pool that does not fit.

        What stays the same from step to step is checked here: with a step of no requests.
        """
        keys, values = pool.views(layer.index)
        nothing, window = torch.empty(0, device=keys.device), layer.window or 0
        query = keys.new_empty((0, layer.shape.num_heads, layer.shape.head_dim), dtype=dtype)
        table, lengths, starts = (
            torch.zeros(size, dtype=torch.int32, device=keys.device) for size in ((0, 1), 0, 1)
        )
        step = (table, lengths, starts, None, layer.scale, window, *_PLAIN)
        check_attention("paged_attention", Paged(query, keys, values, *step), query, nothing)
        return KernelAttend(keys, values, layer.scale, window, self._decode, self._prefill, nothing)


@dataclass(frozen=True, slots=True)
class KernelAttend:
    """One layer's attention: each kernel writes the rows of its own requests."""

    keys: torch.Tensor  # [num_blocks, num_kv_heads, KV_BLOCK, head_dim]
    values: torch.Tensor
    scale: float
    window: int  # 0: every key
    decode: Workspace
    prefill: PrefillWorkspace
    no_lse: torch.Tensor

    def __call__(self, plan: KernelPlan, query: torch.Tensor, out: torch.Tensor) -> None:
        """Write every token's causal attention to out; both [num_tokens, num_heads, head_dim]."""
        step, kernels = plan.metadata, torch.ops.kiln
        paged = (
            out, self.no_lse, query, self.keys, self.values, step.block_table, step.seq_lens,
            step.cu_seqlens_q,
        )  # fmt: skip
        numbers = (self.scale, self.window, *_PLAIN)
        if plan.decodes:
            work = self.decode
            kernels.paged_attention.default(
                *paged, work.item_tables[self.window], None, work.partials, work.mail,
                work.arrivals, *numbers,
            )  # fmt: skip
        if plan.prefills:
            kernels.paged_prefill.default(
                *paged, self.prefill.items[self.window], None, self.prefill.counter, *numbers
            )
