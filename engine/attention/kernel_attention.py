"""Paged attention by Kiln's kernels: one for the requests with few tokens, one for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.engine.attention.context import AttentionContext
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK, MOST_TOKENS
from kiln.jit_kernels.ops.attention_decode.functions import paged_attention, plan_attention
from kiln.jit_kernels.ops.attention_decode.workspace import Workspace, make_workspace
from kiln.jit_kernels.ops.attention_prefill.functions import paged_prefill, plan_prefill
from kiln.jit_kernels.ops.attention_prefill.workspace import (
    PrefillWorkspace,
    make_prefill_workspace,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step there can be."""

    max_requests: int
    max_tokens: int  # of all requests
    max_length: int  # tokens in the pool of one request


class KernelAttention:
    """The memory that the kernels work in, which is taken before the KV pool is sized."""

    def __init__(
        self,
        shape: KVShape,
        num_heads: int,
        windows: Sequence[int | None],
        limits: Limits,
        device: torch.device,
    ) -> None:
        own = sorted({window or 0 for window in windows})
        self._decode = make_workspace(
            max_requests=limits.max_requests,
            max_tokens=limits.max_tokens,
            max_blocks=-(-limits.max_length // KV_BLOCK),
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_dtype=shape.dtype,
            device=device,
            windows=own,
        )
        self._prefill = make_prefill_workspace(
            max_requests=limits.max_requests,
            max_tokens=limits.max_tokens,
            group=num_heads // shape.num_kv_heads,
            device=device,
            windows=own,
        )

    def context(self, metadata: AttentionMetadata, pool: KVPool) -> AttentionContext:
        """Queue the plans of a step; the host only looks at which kernels have work."""
        few = any(count <= MOST_TOKENS for count in metadata.query_lens)
        many = any(count > MOST_TOKENS for count in metadata.query_lens)
        num_tokens = sum(metadata.query_lens)
        lengths = (metadata.seq_lens, metadata.cu_seqlens_q, num_tokens)
        if few:
            plan_attention(self._decode, metadata.block_table, *lengths)
        if many:
            plan_prefill(self._prefill, *lengths)
        decode, prefill = self._decode if few else None, self._prefill if many else None
        return AttentionContext(metadata, pool, KernelStep(metadata, pool, decode, prefill))


@dataclass(frozen=True, slots=True)
class KernelStep:
    """A planned step. A workspace is None where its kernel has no request."""

    metadata: AttentionMetadata
    pool: KVPool
    decode: Workspace | None
    prefill: PrefillWorkspace | None

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return every token's causal attention: each kernel writes its own requests' rows."""
        out, metadata = query.new_empty(query.shape), self.metadata
        paged = (
            query, *self.pool.views(layer), metadata.block_table, metadata.seq_lens,
            metadata.cu_seqlens_q, scale,
        )  # fmt: skip
        if self.decode is not None:
            paged_attention(*paged, window=window or 0, out=out, workspace=self.decode)
        if self.prefill is not None:
            paged_prefill(*paged, window=window or 0, out=out, workspace=self.prefill)
        return out
