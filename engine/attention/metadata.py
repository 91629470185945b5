"""The attention metadata of a step: query lengths, context lengths, slots and block tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's requests, in the order of their tokens.

    The tuples are host copies, with which torch's implementation plans without a device sync.
    """

    slot_mapping: torch.Tensor  # [num_tokens] int64: slot of each token's key and value
    block_table: torch.Tensor  # [num_requests, max_blocks] int32, 0 past a request's last block
    cu_seqlens_q: torch.Tensor  # [num_requests + 1] int32: index of each request's first token
    seq_lens: torch.Tensor  # [num_requests] int32: tokens in the pool after this step
    query_lens: tuple[int, ...]  # tokens of each request in this step
    kv_lens: tuple[int, ...]  # seq_lens; () if only the device knows them
    block_size: int  # tokens
