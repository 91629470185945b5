"""Paged attention by Kiln's kernels: one for requests with few new tokens, one for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import Window, window_number
from kiln.jit_kernels.ops.attention.checks import checked
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK, MOST_TOKENS
from kiln.jit_kernels.ops.attention_decode.functions import launch_paged_attention, plan_attention
from kiln.jit_kernels.ops.attention_decode.workspace import Workspace, make_workspace
from kiln.jit_kernels.ops.attention_prefill.functions import launch_paged_prefill, plan_prefill
from kiln.jit_kernels.ops.attention_prefill.workspace import (
    PrefillWorkspace,
    make_prefill_workspace,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The size of the largest possible step."""

    max_requests: int
    max_tokens: int  # of all requests
    max_length: int  # tokens in the pool of one request


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """A planned step, and which of the two kernels have requests in it."""

    metadata: AttentionMetadata
    decodes: bool
    prefills: bool


class KernelAttention:
    """The kernels' workspaces, which are allocated before the KV pool is sized."""

    def __init__(self, shape: KVShape, limits: Limits, device: torch.device) -> None:
        heads = shape.attention
        self._longest = limits.max_length
        windows = sorted({self._number(window) for window in heads.windows})
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
        """Launch the plan kernels of a step; the host only determines which kernels have work.

        Raises ValueError with the sizes if the step may need more than the workspaces hold.
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
        """Return a layer's attention. Raises ValueError and TypeError if the pool does not fit it.

        Everything that is the same in every step is checked here once, with a step of no requests.
        """
        keys, values = pool.views(layer.index)
        heads = layer.shape
        table, lengths, starts = (
            torch.zeros(size, dtype=torch.int32, device=keys.device) for size in ((0, 1), 0, 1)
        )
        empty = checked(
            "paged_attention",
            out=None,
            lse=None,
            query=keys.new_empty((0, heads.num_heads, heads.head_dim), dtype=dtype),
            key_pool=keys,
            value_pool=values,
            block_table=table,
            seq_lens=lengths,
            cu_seqlens_q=starts,
            sinks=layer.sinks,
            scale=layer.softmax_scale,
            window=self._number(layer.window),
            soft_cap=layer.soft_cap,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
        return KernelAttend(vars(empty), self._decode, self._prefill)

    def _number(self, window: Window | None) -> int:
        """Return a window as the kernels take it: as none if it can hide no key of a request."""
        hides = window is not None and window.size < self._longest
        return window_number(window) if hides else 0


@dataclass(frozen=True, slots=True)
class KernelAttend:
    """One layer's attention: each kernel writes the rows of its own requests."""

    arguments: Mapping[str, Any]  # checked; each step replaces its own
    decode: Workspace
    prefill: PrefillWorkspace

    def __call__(self, plan: KernelPlan, query: torch.Tensor, out: torch.Tensor) -> None:
        """Write every token's causal attention to out; both [num_tokens, num_heads, head_dim]."""
        step = plan.metadata
        arguments = {
            **self.arguments,
            "out": out,
            "query": query,
            "block_table": step.block_table,
            "seq_lens": step.seq_lens,
            "cu_seqlens_q": step.cu_seqlens_q,
        }
        if plan.decodes:
            launch_paged_attention(self.decode, **arguments)
        if plan.prefills:
            launch_paged_prefill(self.prefill, **arguments)
