"""What torch's attention computes once per step for all layers of one window: slots, masks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.kv.shape import Window, window_number
from kiln.jit_kernels.ops.attention.visible import first_visible

_SHORT = 128  # tokens: below this length, padding costs less than another group


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode requests of similar length, computed with one gather and one batched product.

    Padding in ``slots`` repeats the request's own first visible slot, so that it never reads
    another request's values: a masked NaN is still NaN.
    """

    tokens: torch.Tensor  # [num_rows] int64: index in the step
    slots: torch.Tensor  # [num_rows * length] int64
    mask: torch.Tensor  # [num_rows, 1, 1, length]: 0 if visible, else -inf
    length: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One request with several tokens in this step."""

    first: int  # its tokens in the step are first … last - 1
    last: int
    slots: torch.Tensor  # [num_keys] int64: the visible keys, the new tokens included
    mask: torch.Tensor | None  # [last - first, num_keys] bool; None: causal from the first key


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan of a step's attention for one window size."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]

    @property
    def is_one_group(self) -> bool:
        """Whether one group holds every token of the step, in order."""
        return len(self.groups) == 1 and not self.chunks


def plan_attention(
    metadata: AttentionMetadata, window: Window | None, dtype: torch.dtype
) -> AttentionPlan:
    """Plan a step whose lengths the host knows. ``window`` None: a token attends to all keys."""
    number = window_number(window)
    spans = [length - max(0, first_visible(length, number)) for length in metadata.kv_lens]
    decodes = [row for row, tokens in enumerate(metadata.query_lens) if tokens == 1]
    decodes.sort(key=lambda row: spans[row])
    firsts = list(accumulate(metadata.query_lens, initial=0))
    groups = []
    while decodes:
        limit = max(2 * spans[decodes[0]], _SHORT)  # at most half of a gather is padding
        rows = [row for row in decodes if spans[row] <= limit]
        decodes = decodes[len(rows) :]
        groups.append(_group(metadata, sorted(rows), firsts, spans, dtype))
    chunks = [
        _chunk(metadata, row, firsts[row], number)
        for row, tokens in enumerate(metadata.query_lens)
        if tokens > 1
    ]
    return AttentionPlan(tuple(groups), tuple(chunks))


def _group(
    metadata: AttentionMetadata,
    rows: list[int],
    firsts: list[int],
    spans: list[int],
    dtype: torch.dtype,
) -> DecodeGroup:
    device = metadata.block_table.device
    length = max(spans[row] for row in rows)
    ends = torch.tensor(
        [[metadata.kv_lens[row], spans[row]] for row in rows], dtype=torch.int64, device=device
    )
    span = ends[:, 1:]
    offsets = torch.arange(length, device=device)
    hidden = offsets >= span  # [num_rows, length]
    positions = ends[:, :1] - span + offsets.masked_fill(hidden, 0)
    table = metadata.block_table
    if len(rows) < len(metadata.query_lens):
        table = table[torch.tensor(rows, device=device)]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return DecodeGroup(
        tokens=torch.tensor([firsts[row] for row in rows], device=device),
        slots=_slots(table, positions, metadata.block_size).flatten(),
        mask=mask.masked_fill_(hidden, float("-inf")).view(len(rows), 1, 1, length),
        length=length,
    )


def _chunk(metadata: AttentionMetadata, row: int, first: int, window: int) -> PrefillChunk:
    tokens, length = metadata.query_lens[row], metadata.kv_lens[row]
    device = metadata.block_table.device
    start = max(0, first_visible(length - tokens + 1, window))
    keys = torch.arange(start, length, device=device)
    mask = None
    if length > tokens or first_visible(length, window) > 0:
        ends = torch.arange(length - tokens + 1, length + 1, device=device).unsqueeze(1)
        mask = keys < ends
        if window:
            mask &= keys >= first_visible(ends, window)
    slots = _slots(metadata.block_table[row : row + 1], keys.unsqueeze(0), metadata.block_size)
    return PrefillChunk(first, first + tokens, slots.flatten(), mask)


def _slots(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Map positions [num_rows, length] to slots through block_table [num_rows, max_blocks]."""
    blocks = block_table.long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size
