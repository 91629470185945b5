"""What attention must know about a step: which tokens, in which blocks, how many before them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's requests, in the order of their tokens.

    The tuples repeat on the host what torch's implementation needs to plan without waiting for
    the device.
    """

    slot_mapping: torch.Tensor  # [num_tokens] int64: where each token's key and value go
    block_table: torch.Tensor  # [num_requests, max_blocks] int32, 0 past a request's last block
    cu_seqlens_q: torch.Tensor  # [num_requests + 1] int32: where each request's tokens begin
    seq_lens: torch.Tensor  # [num_requests] int32: tokens in the pool after this step
    query_lens: tuple[int, ...]  # tokens of each request in this step
    kv_lens: tuple[int, ...]  # seq_lens
    block_size: int  # tokens
