"""The input tensors of a Batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.requests.batch import Batch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of one forward pass."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    sample_rows: torch.Tensor  # [num_samples] int64: the tokens that need logits
    metadata: AttentionMetadata


def make_inputs(batch: Batch, block_size: int, device: torch.device) -> ForwardInputs:
    """Concatenate the tokens of a batch's requests; makes one copy to the device."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    starts = [0]
    for request in batch.requests:
        first, count = request.num_computed_tokens, len(request.token_ids)
        token_ids += request.token_ids
        positions += range(first, first + count)
        slots += _slots(request, block_size)
        starts.append(len(token_ids))
        if request.samples:
            sample_rows.append(len(token_ids) - 1)
    query_lens = tuple(len(request.token_ids) for request in batch.requests)
    kv_lens = tuple(
        request.num_computed_tokens + len(request.token_ids) for request in batch.requests
    )
    width = max(len(request.block_ids) for request in batch.requests)
    table = [
        block
        for request in batch.requests
        for block in request.block_ids + [0] * (width - len(request.block_ids))
    ]
    parts = [token_ids, positions, slots, sample_rows, starts, kv_lens, table]
    tensors = _to_device([list(part) for part in parts], device)
    metadata = AttentionMetadata(
        slot_mapping=tensors[2],
        block_table=tensors[6].to(torch.int32).view(len(query_lens), width),
        cu_seqlens_q=tensors[4].to(torch.int32),
        seq_lens=tensors[5].to(torch.int32),
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_size=block_size,
    )
    return ForwardInputs(tensors[0], tensors[1], tensors[3], metadata)


def _slots(request: ScheduledRequest, block_size: int) -> list[int]:
    first, blocks = request.num_computed_tokens, request.block_ids
    return [
        blocks[position // block_size] * block_size + position % block_size
        for position in range(first, first + len(request.token_ids))
    ]


def _to_device(parts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return each list as an int64 tensor on the device; makes one copy for all."""
    together = torch.tensor([item for part in parts for item in part], dtype=torch.int64)
    if device.type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    return torch.split(together, [len(part) for part in parts])
