"""Triton forms of prefill attention: the same plan, one program per tile and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.ops.attention.parameters import strides_of
from kiln.jit_kernels.ops.attention.triton import (
    finish,
    first_visible,
    options_of,
    pools_of,
    step,
    tiles_that_fit,
)
from kiln.jit_kernels.ops.attention.variants import MOST_TOKENS
from kiln.jit_kernels.ops.attention_prefill.tiles import TILE_KEYS, TILE_ROWS

_MOST_TOKENS = tl.constexpr(MOST_TOKENS)
_ROWS = tl.constexpr(TILE_ROWS)
_RANGES = tl.constexpr(16)  # of weights, as in ordered_tiles
_SEARCH = tl.constexpr(24)  # steps of a binary search: enough for the tiles of any request
_STAGES = (1, 4, 5)  # of the loop, if one, two, or at least three tiles of keys and values fit


@triton.jit
def _end(length, tokens, group, tile):
    """Return the end of the range of blocks that some row of a tile sees."""
    last = tl.minimum(tokens - 1, (tile * _ROWS + _ROWS - 1) // group)
    return (tl.maximum(0, length - tokens + last + 1) + 15) // 16


@triton.jit
def _weight(length, tokens, group, window, tile):
    reach = tl.where(window < 0, -window, window)
    most = tl.where(reach > 0, (reach + _ROWS // group) // 16 + 1, 0x7FFFFFFF)
    return tl.minimum(_end(length, tokens, group, tile), most)


@triton.jit
def _first_tile(length, tokens, group, window, count, shift, wanted):
    """Return the first tile whose weight is in range ``wanted`` or a higher one."""
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
            least = tl.maximum(0, first_visible(limit, window)) // 16
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
    table_row, num_kv_heads, group, window, qk_scale, soft_cap, v_scale, D: tl.constexpr,
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
        least = first_visible(limit, window)
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
            o, top, total = step(
                o, top, total, q, keys, values, table, start, end, limit, least, key_block,
                key_token, value_block, value_token, qk_scale, soft_cap, D, DIM, TILE, FP8, COMPUTE,
            )  # fmt: skip
        to = token * (num_kv_heads * group) + head
        finish(out, lse, sinks, to, head, used, o, top, total, v_scale, D, DIM, LSE, SINKS)


def prefill_plan(a: Arguments) -> None:
    """Write the table of tiles, as the CUDA kernel does."""
    count = a.seq_lens.shape[0]
    _plan[(1,)](
        a.items, a.seq_lens, a.cu_seqlens_q, count, a.items.shape[0] - 1, a.group, a.window,
        ALL=triton.next_power_of_2(max(count, 1)),
    )  # fmt: skip


def _loop(query: torch.Tensor, tile: int) -> tuple[int, int]:
    """Return the keys per iteration and the pipeline stages that fit in shared memory."""
    tiles = tiles_that_fit(query, TILE_ROWS, TILE_KEYS, tile)
    if tiles == 0:  # heads of 256 on a small GPU
        return TILE_KEYS // 2, _STAGES[0]
    return TILE_KEYS, _STAGES[min(tiles, len(_STAGES)) - 1]


def paged_prefill(a: Arguments) -> None:
    """Write out and lse. The counter is not used."""
    options, kv_heads = options_of(a), a.key_pool.shape[1]
    keys, stages = _loop(a.query, options["DIM"])
    programs = (a.items.shape[0] - 1) * kv_heads
    if programs:
        _prefill[(programs,)](
            a.out, a.lse, a.query, *pools_of(a), a.block_table, a.seq_lens, a.cu_seqlens_q,
            a.items, a.sinks, *strides_of(a).values(), kv_heads, a.query.shape[1] // kv_heads,
            a.window, a.scale * a.k_scale, a.soft_cap, a.v_scale, TILE=keys, STAGES=stages,
            num_warps=8 if options["D"] > 64 else 4, **options,
        )  # fmt: skip
