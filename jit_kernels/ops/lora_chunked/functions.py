"""The public functions of LoRA by chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kiln.jit_kernels.ops.lora.functions import PoolTables, two_ends
from kiln.jit_kernels.ops.lora_chunked.chunks import LARGE, SMALL, num_chunks
from kiln.jit_kernels.ops.lora_chunked.spec import LORA_CHUNKED_EXPAND, LORA_CHUNKED_SHRINK
from kiln.jit_kernels.ops.moe.spec import ALIGN_TOKENS
from kiln.jit_kernels.ops.shared.shapes import check_dtype, check_shape
from kiln.jit_kernels.torch_ops import call


class ChunkTable(NamedTuple):
    """A step's tokens sorted by adapter, in chunks of one adapter each; all int32.

    ``sorted_token_ids`` [num_chunks * chunk]: the tokens of each chunk, in their order, then
    padding, which is num_tokens. ``chunk_slots`` [num_chunks]: the adapter slot of each chunk, -1
    behind the last. Tokens without an adapter are in no chunk. ``end`` [1] and ``slot_ends``
    [num_slots] are what ``align_tokens`` also writes: the end of all chunks, and of each slot's.
    """

    sorted_token_ids: torch.Tensor
    chunk_slots: torch.Tensor
    end: torch.Tensor
    slot_ends: torch.Tensor

    @property
    def chunk(self) -> int:
        """The tokens of a chunk."""
        return self.sorted_token_ids.numel() // max(self.chunk_slots.numel(), 1)

    @classmethod
    def holding(cls, max_tokens: int, num_slots: int, device: torch.device) -> ChunkTable:
        """Return memory for the tables of up to so many tokens; ``of`` returns its parts."""
        small = num_chunks(max_tokens, num_slots, SMALL)
        places = max(small * SMALL, num_chunks(max_tokens, num_slots, LARGE) * LARGE)
        sizes = (places, small, 1, num_slots)
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))

    def of(self, num_tokens: int, chunk: int) -> ChunkTable:
        """Return the part of this memory for the table of so many tokens in chunks of this size.

        Raises ValueError if it has no room for them.
        """
        count = num_chunks(num_tokens, self.slot_ends.numel(), chunk)
        ids, slots = self.sorted_token_ids[: count * chunk], self.chunk_slots[:count]
        check_shape("ChunkTable", "sorted_token_ids", ids, (count * chunk,))
        check_shape("ChunkTable", "chunk_slots", slots, (count,))
        return self._replace(sorted_token_ids=ids, chunk_slots=slots)


def make_chunks(token_slots: torch.Tensor, table: ChunkTable) -> None:
    """Fill the chunk table of a step, in one launch of ``align_tokens``.

    token_slots: [num_tokens] int32, the adapter slot of each token, -1 for none. ``table``: of
    exactly so many tokens, at most 512 slots. Raises ValueError on a wrong shape, TypeError on a
    wrong dtype.
    """
    if token_slots.dtype != torch.int32:
        raise TypeError(f"make_chunks: token_slots is {token_slots.dtype}; want torch.int32")
    check_shape("make_chunks", "token_slots", token_slots, (token_slots.numel(),))
    _check_table("make_chunks", table, token_slots.numel(), table.slot_ends.numel())
    call(
        ALIGN_TOKENS,
        ids=token_slots[:, None],
        block_size=table.chunk,
        sorted_token_ids=table.sorted_token_ids,
        expert_ids=table.chunk_slots,
        num_tokens_post_padded=table.end,
        expert_ends=table.slot_ends,
    )


def lora_chunked_shrink(
    x: torch.Tensor, pool: PoolTables, table: ChunkTable, h: torch.Tensor
) -> None:
    """Write A x of the site's parts, one part behind the other, to h.

    x: [num_tokens, input_size] in the pool's dtype, rows may be strided. ``table``: the chunks of
    these tokens. h: [num_tokens, width] float32, width at least the sum of the parts' ranks in any
    slot in use; elements beyond that sum, and rows without an adapter, are left as they are. The
    bits of a row depend on no other row. Raises ValueError on a wrong shape, TypeError on a wrong
    dtype.
    Source: https://arxiv.org/abs/2310.18547
    """
    check_dtype("lora_chunked_shrink", x=x, pool=pool.values)
    _check("lora_chunked_shrink", pool, table, x.shape[0], h)
    call(
        LORA_CHUNKED_SHRINK,
        h=h,
        x=x if x.stride(1) == 1 else x.contiguous(),
        adapter_pool=pool.values,
        sorted_token_ids=table.sorted_token_ids,
        chunk_slots=table.chunk_slots,
        rank_table=pool.ranks,
        a_table=pool.a_offsets,
    )


def lora_chunked_expand(
    h: torch.Tensor,
    pool: PoolTables,
    table: ChunkTable,
    part_ends: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Add scale * B h of each part to its columns of out, in place.

    h, table: as in lora_chunked_shrink. part_ends: where the columns of each part end in out. out:
    [num_tokens, output_size] in the pool's dtype, dense rows, any row stride. Each sum is float32
    and is rounded once, when it is added. Raises ValueError on a wrong shape, TypeError on a wrong
    dtype.
    """
    check_dtype("lora_chunked_expand", out=out, pool=pool.values)
    _check("lora_chunked_expand", pool, table, out.shape[0], h)
    end0, end1 = two_ends("lora_chunked_expand", part_ends, pool, out)
    call(
        LORA_CHUNKED_EXPAND,
        out=out,
        h=h,
        adapter_pool=pool.values,
        sorted_token_ids=table.sorted_token_ids,
        chunk_slots=table.chunk_slots,
        end0=end0,
        end1=end1,
        rank_table=pool.ranks,
        scale_table=pool.scales,
        b_table=pool.b_offsets,
    )


def _check(
    function: str, pool: PoolTables, table: ChunkTable, tokens: int, h: torch.Tensor
) -> None:
    _check_table(function, table, tokens, pool.ranks.shape[1])
    if table.chunk == LARGE and pool.values.dtype == torch.float32:
        raise ValueError(f"{function}: chunks of {LARGE} tokens in float32; want {SMALL}")
    check_shape(function, "h", h, (tokens, h.shape[-1]))
    if h.dtype != torch.float32:
        raise TypeError(f"{function}: h is {h.dtype}; want torch.float32")


def _check_table(function: str, table: ChunkTable, tokens: int, num_slots: int) -> None:
    chunk, ids = table.chunk, table.sorted_token_ids
    if chunk not in (SMALL, LARGE):
        raise ValueError(f"{function}: chunks of {chunk} tokens; want {SMALL} or {LARGE}")
    count = num_chunks(tokens, num_slots, chunk)
    check_shape(function, "sorted_token_ids", ids, (count * chunk,))
    check_shape(function, "slot_ends", table.slot_ends, (num_slots,))
    if ids.dtype != torch.int32 or table.chunk_slots.dtype != torch.int32:
        raise TypeError(
            f"{function}: the chunk table is {ids.dtype} and {table.chunk_slots.dtype}; want "
            "torch.int32"
        )
