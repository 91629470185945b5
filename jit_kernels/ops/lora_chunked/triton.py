"""Triton forms of the chunked LoRA kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments

_COLUMNS, _BLOCK = 16, 64  # of shrink: columns of h, and elements of their sums at once
_TILE, _DEPTH = 64, 16  # of expand: columns of out, and ranks at once


@triton.jit
def _shrink(  # noqa: PLR0913
    h, x, adapter_pool, sorted_token_ids, chunk_slots, rank_table, a_table,
    tokens, input_size, x_stride, h_stride, num_slots,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.load(chunk_slots + tl.program_id(0))
    if slot >= 0:
        token = tl.load(sorted_token_ids + tl.program_id(0) * CHUNK + tl.arange(0, CHUNK))
        used = token < tokens
        token = token.to(tl.int64)
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
        if tl.program_id(1) * COLUMNS < end:
            sums = tl.zeros((CHUNK, COLUMNS), tl.float32)
            for first in range(0, input_size, BLOCK):
                i = first + tl.arange(0, BLOCK)
                inside = i < input_size
                own = x + token[:, None] * x_stride + i[None, :]
                own = tl.load(own, mask=used[:, None] & inside[None, :], other=0.0)
                mask = inside[:, None] & (columns < end)[None, :]
                a = tl.load(adapter_pool + begin[None, :] + i[:, None], mask=mask, other=0.0)
                sums += tl.dot(own.to(tl.float32), a.to(tl.float32), input_precision="ieee")
            to = h + token[:, None] * h_stride + columns[None, :]
            tl.store(to, sums, mask=used[:, None] & (columns < end)[None, :])


@triton.jit
def _expand(  # noqa: PLR0913
    out, h, adapter_pool, sorted_token_ids, chunk_slots, rank_table, scale_table, b_table,
    tokens, out_stride, h_stride, end0, end1, outputs, num_slots,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    slot = tl.load(chunk_slots + tl.program_id(0))
    if slot >= 0:
        token = tl.load(sorted_token_ids + tl.program_id(0) * CHUNK + tl.arange(0, CHUNK))
        used = (token < tokens)[:, None]
        token = token.to(tl.int64)
        columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
        own = h + token[:, None] * h_stride
        for part in tl.static_range(PARTS):
            at = part * num_slots + slot
            rank = tl.load(rank_table + at)
            start = 0 if part == 0 else (end0 if part == 1 else end1)
            end = end0 if part == 0 else (end1 if part == 1 else outputs)
            inside = ((columns >= start) & (columns < end))[None, :]
            overlap = (start < (tl.program_id(1) + 1) * TILE) & (end > tl.program_id(1) * TILE)
            if (rank > 0) & overlap:
                sums = tl.zeros((CHUNK, TILE), tl.float32)
                b = adapter_pool + tl.load(b_table + at) + (columns - start)[None, :]
                for first in range(0, rank, DEPTH):
                    k = first + tl.arange(0, DEPTH)
                    a = tl.load(own + k[None, :], mask=used & (k < rank)[None, :], other=0.0)
                    row = k.to(tl.int64)[:, None] * (end - start)
                    weight = tl.load(b + row, mask=(k < rank)[:, None] & inside, other=0.0)
                    sums += tl.dot(a, weight.to(tl.float32), input_precision="ieee")
                y = out + token[:, None] * out_stride + columns[None, :]
                total = tl.load(y, mask=used & inside, other=0.0).to(tl.float32)
                total += sums * tl.load(scale_table + at)
                tl.store(y, total.to(out.dtype.element_ty), mask=used & inside)
            own += rank


def lora_chunked_shrink(a: Arguments) -> None:
    """Write A x of each token's adapter to h."""
    (tokens, input_size), width, chunks = a.x.shape, a.h.shape[1], len(a.chunk_slots)
    if width:
        _shrink[(chunks, triton.cdiv(width, _COLUMNS))](
            a.h, a.x, a.adapter_pool, a.sorted_token_ids, a.chunk_slots, a.rank_table, a.a_table,
            tokens, input_size, a.x.stride(0), a.h.stride(0), a.rank_table.shape[1],
            len(a.rank_table), len(a.sorted_token_ids) // chunks, _COLUMNS, _BLOCK,
        )  # fmt: skip


def lora_chunked_expand(a: Arguments) -> None:
    """Add scale * B h of each token's adapter to out."""
    (tokens, outputs), chunks = a.out.shape, len(a.chunk_slots)
    if outputs:
        _expand[(chunks, triton.cdiv(outputs, _TILE))](
            a.out, a.h, a.adapter_pool, a.sorted_token_ids, a.chunk_slots, a.rank_table,
            a.scale_table, a.b_table, tokens, a.out.stride(0), a.h.stride(0), a.end0, a.end1,
            outputs, a.rank_table.shape[1], len(a.rank_table),
            len(a.sorted_token_ids) // chunks, _TILE, _DEPTH,
        )  # fmt: skip
