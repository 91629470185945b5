"""Triton forms of the LoRA kernels: a program for each place in the tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments

_COLUMNS, _BLOCK = 4, 256  # of shrink: columns of h, and elements of their sums at once
_WIDTH = 512  # of expand: columns of out


@triton.jit
def _shrink(  # noqa: PLR0913
    h, x, adapter_pool, tile_slots, tile_tokens, rank_table, a_table,
    input_size, x_stride, h_stride, num_slots,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.load(tile_tokens + tl.program_id(0)).to(tl.int64)
    slot = tl.load(tile_slots + tl.program_id(0) // TILE)
    if token >= 0:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        begin = tl.zeros((COLUMNS,), tl.int64)
        end = 0
        for part in tl.static_range(PARTS):
            at = part * num_slots + slot
            rank = tl.load(rank_table + at)
            row = columns - end
            here = tl.load(a_table + at) + row.to(tl.int64) * input_size
            begin = tl.where((row >= 0) & (row < rank), here, begin)
            end += rank
        sums = tl.zeros((COLUMNS,), tl.float32)
        if tl.program_id(1) * COLUMNS < end:
            for first in range(0, input_size, BLOCK):
                i = first + tl.arange(0, BLOCK)
                inside = i < input_size
                own = tl.load(x + token * x_stride + i, mask=inside, other=0.0).to(tl.float32)
                mask = (columns < end)[:, None] & inside[None, :]
                a = tl.load(adapter_pool + begin[:, None] + i[None, :], mask=mask, other=0.0)
                sums += tl.sum(own[None, :] * a.to(tl.float32), 1)
            tl.store(h + token * h_stride + columns, sums, mask=columns < end)


@triton.jit
def _expand(  # noqa: PLR0913
    out, h, adapter_pool, tile_slots, tile_tokens, rank_table, scale_table, b_table,
    out_stride, h_stride, end0, end1, outputs, num_slots,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.load(tile_tokens + tl.program_id(0)).to(tl.int64)
    slot = tl.load(tile_slots + tl.program_id(0) // TILE)
    if token >= 0:
        columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        own = h + token * h_stride
        for part in tl.static_range(PARTS):
            at = part * num_slots + slot
            rank = tl.load(rank_table + at)
            start = 0 if part == 0 else (end0 if part == 1 else end1)
            end = end0 if part == 0 else (end1 if part == 1 else outputs)
            inside = (columns >= start) & (columns < end)
            overlap = (start < (tl.program_id(1) + 1) * WIDTH) & (end > tl.program_id(1) * WIDTH)
            if (rank > 0) & overlap:
                sums = tl.zeros((WIDTH,), tl.float32)
                b = adapter_pool + tl.load(b_table + at) + (columns - start)
                for k in range(rank):
                    weight = tl.load(b, mask=inside, other=0.0)
                    sums += tl.load(own + k) * weight.to(tl.float32)
                    b += end - start
                y = out + token * out_stride + columns
                total = tl.load(y, mask=inside, other=0.0).to(tl.float32)
                total += sums * tl.load(scale_table + at)
                tl.store(y, total.to(out.dtype.element_ty), mask=inside)
            own += rank


@triton.jit
def _embedding(  # noqa: PLR0913
    h, token_ids, adapter_pool, tile_slots, tile_tokens, rank_table, a_table, h_stride,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.load(tile_tokens + tl.program_id(0)).to(tl.int64)
    slot = tl.load(tile_slots + tl.program_id(0) // TILE)
    if token >= 0:
        rank = tl.load(rank_table + slot)
        if rank > 0:
            columns = tl.arange(0, BLOCK)
            a = adapter_pool + tl.load(a_table + slot) + tl.load(token_ids + token) * rank
            own = tl.load(a + columns, mask=columns < rank, other=0.0).to(tl.float32)
            tl.store(h + token * h_stride + columns, own, mask=columns < rank)


def lora_shrink(a: Arguments) -> None:
    """Write A x of each token's adapter to h."""
    places, width = a.tile_tokens.numel(), a.h.shape[1]
    if places and width:
        _shrink[(places, triton.cdiv(width, _COLUMNS))](
            a.h, a.x, a.adapter_pool, a.tile_slots, a.tile_tokens, a.rank_table, a.a_table,
            a.x.shape[1], a.x.stride(0), a.h.stride(0), a.rank_table.shape[1],
            len(a.rank_table), _COLUMNS, _BLOCK, a.tile_tokens.shape[1],
        )  # fmt: skip


def lora_expand(a: Arguments) -> None:
    """Add scale * B h of each token's adapter to out."""
    places, outputs = a.tile_tokens.numel(), a.out.shape[1]
    if places and outputs:
        _expand[(places, triton.cdiv(outputs, _WIDTH))](
            a.out, a.h, a.adapter_pool, a.tile_slots, a.tile_tokens, a.rank_table,
            a.scale_table, a.b_table, a.out.stride(0), a.h.stride(0), a.end0, a.end1,
            outputs, a.rank_table.shape[1], len(a.rank_table), _WIDTH, a.tile_tokens.shape[1],
        )  # fmt: skip


def lora_shrink_embedding(a: Arguments) -> None:
    """Write the columns of A for the token ids to h."""
    places, width = a.tile_tokens.numel(), a.h.shape[1]
    if places and width:
        _embedding[(places,)](
            a.h, a.token_ids, a.adapter_pool, a.tile_slots, a.tile_tokens, a.rank_table, a.a_table,
            a.h.stride(0), triton.next_power_of_2(width), a.tile_tokens.shape[1],
        )  # fmt: skip
