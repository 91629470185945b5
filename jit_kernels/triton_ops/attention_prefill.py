"""Triton forms of prefill attention: the same plan, a program for each tile and KV head."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.attention.splits import MOST_TOKENS
from kiln.jit_kernels.attention.tiles import TILE_KEYS, TILE_ROWS
from kiln.jit_kernels.triton_ops.attention_decode import _finish, _step, tiles_that_fit

_MOST_TOKENS = tl.constexpr(MOST_TOKENS)
_ROWS = tl.constexpr(TILE_ROWS)
_RANGES = tl.constexpr(16)  # of weights, as ordered_tiles has them
_SEARCH = tl.constexpr(24)  # halvings: more than the tiles of any request take
_STAGES = (1, 4, 5)  # of the loop, where keys and values have one buffer, two, three or more


@triton.jit
def _end(length, tokens, group, tile):
    """Return the end of the blocks of which a row of a tile sees a key."""
    last = tl.minimum(tokens - 1, (tile * _ROWS + _ROWS - 1) // group)
    return (tl.maximum(0, length - tokens + last + 1) + 15) // 16


@triton.jit
def _weight(length, tokens, group, window, tile):
    most = tl.where(window > 0, (window + _ROWS // group) // 16 + 1, 0x7FFFFFFF)
    return tl.minimum(_end(length, tokens, group, tile), most)


@triton.jit
def _first_tile(length, tokens, group, window, count, shift, wanted):
    """Return the first tile whose weight lies in a range at least as high as ``wanted``."""
    low, width = count * 0, count
    for _ in range(_SEARCH):
        half = width // 2
        rank = _weight(length, tokens, group, window, low + half) >> shift
        below = (width > 0) & (rank < wanted)
        low = tl.where(below, low + half + 1, low)
        width = tl.where(below, width - half - 1, half)
    return low


@triton.jit
def _plan(items, seq_lens, cu_seqlens_q, num_requests, capacity, group, window, ALL: tl.constexpr):
    request = tl.arange(0, ALL)
    here = request < num_requests
    length = tl.load(seq_lens + request, mask=here, other=0)
    begin = tl.load(cu_seqlens_q + request, mask=here, other=0)
    tokens = tl.load(cu_seqlens_q + request + 1, mask=here, other=0) - begin
    count = tl.where(here & (tokens > _MOST_TOKENS), (tokens * group + _ROWS - 1) // _ROWS, 0)
    weight = _weight(length, tokens, group, window, tl.maximum(count - 1, 0))
    most = tl.max(tl.where(count > 0, weight, 0), 0)
    shift = 0
    for _ in range(31):
        shift += ((most >> shift) >= _RANGES).to(tl.int32)
    done, end = 0, count
    for down in range(_RANGES):
        first = _first_tile(length, tokens, group, window, count, shift, _RANGES - 1 - down)
        n = end - first
        start = done + tl.cumsum(n, 0) - n
        for i in range(tl.max(n, 0)):
            tile = end - 1 - i
            fits = (i < n) & (start + i < capacity)
            to = items + 4 * (1 + start + i)
            last = _end(length, tokens, group, tile)
            limit = length - tokens + tile * _ROWS // group + 1
            least = tl.where(window > 0, tl.maximum(0, limit - window) // 16, 0)
            tl.store(to, request, mask=fits)
            tl.store(to + 1, tile, mask=fits)
            tl.store(to + 2, tl.minimum(least, last), mask=fits)
            tl.store(to + 3, last, mask=fits)
        done += tl.sum(n, 0)
        end = first
    tl.store(items, tl.minimum(done, capacity))
    for i in tl.static_range(1, 4):
        tl.store(items + i, 0)


@triton.jit
def _prefill(  # noqa: PLR0913
    out, lse, query, key_pool, value_pool, block_table, seq_lens, cu_seqlens_q, items, sinks,
    query_token, query_head, key_block, key_head, key_token, value_block, value_head, value_token,
    table_row, num_kv_heads, group, window, scale, soft_cap, v_scale, D: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
    LSE: tl.constexpr, SINKS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    work = tl.program_id(0)
    if work < tl.load(items) * num_kv_heads:
        item, kv_head = items + 4 * (1 + work // num_kv_heads), work % num_kv_heads
        request, tile = tl.load(item), tl.load(item + 1)
        length, first_token = tl.load(seq_lens + request), tl.load(cu_seqlens_q + request)
        tokens = tl.load(cu_seqlens_q + request + 1) - first_token
        begin = tl.load(item + 2) * 16
        end = tl.minimum(tl.load(item + 3) * 16, length)

        d = tl.arange(0, DIM)
        row = tile * _ROWS + tl.arange(0, _ROWS)
        used = row < tokens * group
        limit = tl.where(used, length - tokens + row // group + 1, 0)
        least = tl.where(window > 0, limit - window, 0)
        token, head = (first_token + row // group).to(tl.int64), kv_head * group + row % group
        q = tl.load(
            query + (token * query_token + head * query_head)[:, None] + d[None, :],
            mask=used[:, None] & (d < D)[None, :], other=0.0,
        ).to(COMPUTE)  # fmt: skip
        top, total = tl.full([_ROWS], float("-inf"), tl.float32), tl.zeros([_ROWS], tl.float32)
        o = tl.zeros([_ROWS, DIM], tl.float32)
        table = block_table + request.to(tl.int64) * table_row
        keys, values = key_pool + kv_head * key_head, value_pool + kv_head * value_head
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            o, top, total = _step(
                o, top, total, q, keys, values, table, start, end, limit, least, key_block,
                key_token, value_block, value_token, scale, soft_cap, D, DIM, TILE, FP8, COMPUTE,
            )  # fmt: skip
        to = token * (num_kv_heads * group) + head
        _finish(out, lse, sinks, to, head, used, o, top, total, v_scale, D, DIM, LSE, SINKS)


def prefill_plan(
    out_items: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    group: int,
    window: int,
) -> None:
    """Write the table of tiles, as the kernel of this name does."""
    count = seq_lens.shape[0]
    _plan[(1,)](
        out_items, seq_lens, cu_seqlens_q, count, out_items.shape[0] - 1, group, window,
        ALL=triton.next_power_of_2(max(count, 1)),
    )  # fmt: skip


def _loop(query: torch.Tensor, tile: int) -> tuple[int, int]:
    """Return how many keys a turn of the loop takes, and its stages: what shared memory holds."""
    tiles = tiles_that_fit(query, TILE_ROWS, TILE_KEYS, tile)
    if tiles == 0:  # heads of 256 on a small GPU
        return TILE_KEYS // 2, _STAGES[0]
    return TILE_KEYS, _STAGES[min(tiles, len(_STAGES)) - 1]


def paged_prefill(*arguments: Any) -> None:
    """Write out and out_lse; the arguments of the operator. The counter is not needed."""
    out, lse, query, key_pool, value_pool, table, seq_lens, starts, items, sinks = arguments[:10]
    scale, window, soft_cap, k_scale, v_scale = arguments[11:]
    fp8 = key_pool.dtype != query.dtype
    if fp8:
        key_pool, value_pool = key_pool.view(torch.uint8), value_pool.view(torch.uint8)
    kv_heads, head_dim = key_pool.shape[1], query.shape[2]
    compute = tl.float32  # the interpreter multiplies the bits of bfloat16 as integers
    if query.is_cuda:
        compute = tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float16
    programs, tile = (items.shape[0] - 1) * kv_heads, triton.next_power_of_2(head_dim)
    keys, stages = _loop(query, tile)
    if programs:
        _prefill[(programs,)](
            out, lse, query, key_pool, value_pool, table, seq_lens, starts, items, sinks,
            *query.stride()[:2], *key_pool.stride()[:3], *value_pool.stride()[:3], table.stride(0),
            kv_heads, query.shape[1] // kv_heads, window, scale * k_scale, soft_cap, v_scale,
            D=head_dim, DIM=tile, TILE=keys, STAGES=stages,
            FP8=fp8, LSE=lse.numel() > 0, SINKS=sinks is not None, COMPUTE=compute,
            num_warps=8 if head_dim > 64 else 4,
        )  # fmt: skip
