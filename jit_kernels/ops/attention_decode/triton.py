"""Triton forms of decode attention: the same plan and splits; a second launch merges the splits."""

from __future__ import annotations

import triton
import triton.language as tl

from kiln.jit_kernels.declare.arch import gpu
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
from kiln.jit_kernels.ops.attention_decode.splits import (
    FIRST_IDS,
    ITEM_INTS,
    SCALE_ROOM,
    TILE_ROWS,
)

_MOST_TOKENS = tl.constexpr(MOST_TOKENS)
_ITEM, _FIRST_IDS = tl.constexpr(ITEM_INTS), tl.constexpr(FIRST_IDS)
_ROOM = tl.constexpr(SCALE_ROOM)
_TILE = 64  # keys per iteration
# Pipeline stages of the loop, if shared memory has room for one tile of keys and values or for two.
# The lookup of a block id takes three of them.
_STAGES = (4, 5)
_PROGRAMS = 4  # per multiprocessor


@triton.jit
def _shared(shared, block_table, seq_lens, table_row, CHUNK: tl.constexpr):
    request = tl.program_id(0)
    one, other = tl.load(seq_lens + request), tl.load(seq_lens + tl.maximum(request - 1, 0))
    most = tl.where(request > 0, (tl.minimum(one, other) + 15) // 16, 0)
    own = block_table + request.to(tl.int64) * table_row
    equal, go_on = 0 * most, 1 + 0 * most
    for at in range(0, most, CHUNK):
        i = tl.arange(0, CHUNK)
        here = at + i < most
        ids = tl.load(own + at + i, mask=here, other=0)
        before = tl.load(own - table_row + at + i, mask=here, other=0)
        first = tl.min(tl.where(here & (ids == before), CHUNK, i), 0)  # that differs
        equal += go_on * first
        go_on = tl.where(first < CHUNK, 0, go_on)
    tl.store(shared + request, equal)


@triton.jit
def _cut(  # noqa: PLR0913
    length, tokens, group, window, max_splits, split_blocks, few_splits, longer, warp_bits,
):  # fmt: skip
    """Return first block, blocks, tiles, splits and whether shares have units; see splits.cut."""
    first = tl.maximum(0, first_visible(length - tokens + 1, window)) // 16
    blocks = (length + 15) // 16 - first
    tiles = tl.where(tokens <= _MOST_TOKENS, (tokens * group + 15) // 16, 0)
    most = tl.maximum(1, max_splits // tl.maximum(1, tiles))
    pieces = (blocks + split_blocks - 1) // split_blocks
    some, splits = few_splits, few_splits + 0 * pieces
    while 2 * some <= max_splits:
        splits = tl.where(pieces >= 2 * longer * some, 2 * some, splits)
        some = 2 * some
    splits = tl.where(pieces <= few_splits, pieces, splits)
    splits = tl.maximum(1, tl.minimum(splits, most))
    shares = splits << warp_bits
    nodes = (splits <= 8) | (splits % 8 == 0)
    divisible = (tokens * group <= 8) & nodes & (blocks >= (shares << warp_bits) * 2)
    return first, blocks, tiles, splits, divisible


@triton.jit
def _joins(  # noqa: PLR0913
    every, here, tokens, blocks, splits, divisible, seq_lens, cu_seqlens_q, shared, group, window,
    max_splits, split_blocks, few_splits, longer, warp_bits,
):  # fmt: skip
    """Return which requests share splits with the one before; see splits.groups."""
    later = here & (every > 0)
    length = tl.load(seq_lens + every - 1, mask=later, other=0)
    begin = tl.load(cu_seqlens_q + every - 1, mask=later, other=0)
    end = tl.load(cu_seqlens_q + every, mask=later, other=0)
    _, other_blocks, _, other_splits, other_divisible = _cut(
        length, end - begin, group, window, max_splits=max_splits, split_blocks=split_blocks,
        few_splits=few_splits, longer=longer, warp_bits=warp_bits,
    )  # fmt: skip
    joins = later & (every % tl.maximum(1, 8 // group) != 0) & (window == 0) & (splits > 1)
    joins = joins & (tokens == 1) & (end - begin == 1)
    joins = joins & (splits == other_splits) & (divisible == other_divisible)
    pairs, other_pairs = (blocks + 1) // 2, (other_blocks + 1) // 2
    for split in range(1, tl.max(splits)):
        equal = split * pairs // splits == split * other_pairs // splits
        joins = joins & (equal | (split >= splits))
    common = tl.load(shared + every, mask=here, other=0)
    return joins & (common >= (splits - 1) * pairs // splits * 2)


@triton.jit
def _run(joins, every, request):
    """Return a request's place in its run, and how many requests the run has."""
    place, later = 0, 0
    back, ahead = 1, 1
    for i in tl.static_range(8):
        back = back * tl.max(tl.where((every == request - i) & joins, 1, 0), 0)
        ahead = ahead * tl.max(tl.where((every == request + 1 + i) & joins, 1, 0), 0)
        place, later = place + back, later + ahead
    return place, 1 + place + later


@triton.jit
def _store_places(  # noqa: PLR0913
    to, fits, local, table, first, blocks, num_splits, kind, halvings, warp_bits, members,
    num_tokens, length,
):  # fmt: skip
    """Store each item's size, part, blocks of its split, and the first block ids of its warps."""
    parts, pairs_of_all = num_splits << halvings, (blocks + 1) // 2
    part = local % parts
    split = part >> halvings
    begin = first + tl.minimum(blocks, split * pairs_of_all // num_splits * 2)
    end = first + tl.minimum(blocks, (split + 1) * pairs_of_all // num_splits * 2)
    shared = (members > 1) & (part < parts - 1)
    size = tl.where(shared, members, (members - 1) * 32 + num_tokens)
    tl.store(to + 2, parts * 256 + size, mask=fits)
    tl.store(to + 3, tl.where(shared, end * 16 + members, length), mask=fits)
    is_shared = tl.where(shared, 1 << 28, 0)
    tl.store(to + 4, (kind << 29) + is_shared + (local // parts) * 65536 + part, mask=fits)
    tl.store(to + 6, begin, mask=fits)
    tl.store(to + 7, end, mask=fits)
    pairs, own = (end - begin + 1) // 2, part - (split << halvings)
    for k in range(_FIRST_IDS):
        unit = (own << (2 * warp_bits - halvings)) + (k // 2 << (warp_bits - halvings))
        block = begin + (unit * pairs >> 2 * warp_bits) * 2 + k % 2
        ids = tl.load(table + block, mask=fits & (block < end), other=0)
        tl.store(to + 8 + k, ids, mask=fits)


@triton.jit
def _plan(  # noqa: PLR0913
    items, block_table, seq_lens, cu_seqlens_q, shared, table_row, num_requests, capacity, group,
    window, max_splits, split_blocks, few_splits, longer, warp_bits, ALL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    every = tl.arange(0, ALL)
    here = every < num_requests
    lengths = tl.load(seq_lens + every, mask=here, other=0)
    begins = tl.load(cu_seqlens_q + every, mask=here, other=0)
    tokens = tl.load(cu_seqlens_q + every + 1, mask=here, other=0) - begins
    first, blocks, tiles, splits, divisible = _cut(
        lengths, tokens, group, window, max_splits=max_splits, split_blocks=split_blocks,
        few_splits=few_splits, longer=longer, warp_bits=warp_bits,
    )  # fmt: skip
    undivided = tl.where(here, tiles * splits, 0)
    more = tl.sum(tl.where(divisible, undivided, 0), 0)  # items per additional part
    once, halvings = tl.sum(undivided, 0), warp_bits
    while (halvings > 0) & (once + ((1 << halvings) - 1) * more > max_splits):
        halvings = halvings - 1
    kind = tl.where(divisible, 1 + halvings, 0)
    halvings = tl.where(divisible, halvings, 0)
    parts, counts = splits << halvings, undivided << halvings
    rows = tl.where((counts > 0) & (parts > 1), parts * tokens * group, 0)
    joins = (once > max_splits) & _joins(
        every, here, tokens, blocks, splits, divisible, seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q, shared=shared, group=group, window=window,
        max_splits=max_splits, split_blocks=split_blocks, few_splits=few_splits, longer=longer,
        warp_bits=warp_bits,
    )  # fmt: skip
    counts -= tl.where(joins, splits - 1, 0)
    before = every < request
    start = tl.sum(tl.where(before, counts, 0), 0)
    row_start = tl.sum(tl.where(before, rows, 0), 0)
    if request == num_requests:
        tl.store(items, tl.minimum(start, capacity))
        tl.store(items + 1, row_start)
        tl.store(items + 2, tl.max(tl.where(joins, 1, 0), 0))
        tl.store(items + 3, 0)
    else:
        own = every == request
        first_token, num_tokens = tl.load(cu_seqlens_q + request), tl.sum(tl.where(own, tokens, 0))
        count, n = tl.sum(tl.where(own, counts, 0), 0), tl.sum(tl.where(own, splits, 0), 0)
        own_halvings = tl.sum(tl.where(own, halvings, 0), 0)
        place, members = _run(joins, every, request)
        skipped = tl.where(place > 0, (n << own_halvings) - 1, 0)
        row_start -= place * (n << own_halvings) * group
        for at in range(0, count, 64):
            local = at + tl.arange(0, 64)
            fits = (local < count) & (start + local < capacity)
            to = items + _ITEM * (1 + start + local)
            tl.store(to, request + 0 * local, mask=fits)
            tl.store(to + 1, first_token + 0 * local, mask=fits)
            tl.store(to + 5, row_start + place * group + 0 * local, mask=fits)
            _store_places(
                to, fits, local + skipped, block_table + request.to(tl.int64) * table_row,
                tl.sum(tl.where(own, first, 0), 0), tl.sum(tl.where(own, blocks, 0), 0), n,
                tl.sum(tl.where(own, kind, 0), 0), own_halvings, warp_bits, members, num_tokens,
                tl.load(seq_lens + request),
            )  # fmt: skip


@triton.jit
def _item_keys(item, place):
    """Return the range of an item's keys: those of its split, or of half or a quarter of it."""
    first, end = tl.load(item + 6), tl.load(item + 7)
    halvings = tl.maximum(place >> 29, 1) - 1
    pairs, own = (end - first + 1) // 2, place % (1 << halvings)
    last = first + tl.minimum(end - first, ((own + 1) * pairs >> halvings) * 2)
    return (first + (own * pairs >> halvings) * 2) * 16, last * 16


@triton.jit
def _attend(  # noqa: PLR0913
    out, lse, query, key_pool, value_pool, block_table, items, sinks, partials,
    query_token, query_head, key_block, key_head, key_token, value_block, value_head, value_token,
    table_row, num_kv_heads, group, window, qk_scale, soft_cap, v_scale, D: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
    LSE: tl.constexpr, SINKS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    num_work = tl.load(items) * num_kv_heads
    d = tl.arange(0, DIM)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items + _ITEM * (1 + work // num_kv_heads)
        kv_head = work % num_kv_heads
        request, first_token, size = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        tokens, length, part = size % 32, tl.load(item + 3), tl.load(item + 4)
        tile, split = part // 65536 % 4096, part % 65536
        begin, end = _item_keys(item, part)
        end = tl.minimum(end, length)
        row = tile * 16 + tl.arange(0, 16)
        used = row < tokens * group
        limit = tl.where(used, length - tokens + row // group + 1, 0)
        least = first_visible(limit, window)
        token, head = (first_token + row // group).to(tl.int64), kv_head * group + row % group
        q = tl.load(
            query + (token * query_token + head * query_head)[:, None] + d[None, :],
            mask=used[:, None] & (d < D)[None, :], other=0.0,
        ).to(COMPUTE)  # fmt: skip
        top, total = tl.full([16], float("-inf"), tl.float32), tl.zeros([16], tl.float32)
        o = tl.zeros([16, DIM], tl.float32)
        table = block_table + request.to(tl.int64) * table_row
        keys, values = key_pool + kv_head * key_head, value_pool + kv_head * value_head
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            o, top, total = step(
                o, top, total, q, keys, values, table, start, end, limit, least, key_block,
                key_token, value_block, value_token, qk_scale, soft_cap, D, DIM, TILE, FP8, COMPUTE,
            )  # fmt: skip
        if size < 512:  # one split
            finish(out, lse, sinks, token * (num_kv_heads * group) + head, head, used, o, top,
                   total, v_scale, D, DIM, LSE, SINKS)  # fmt: skip
        else:
            others = size // 32 % 8  # tokens of other requests, between its partial rows
            slot = tl.load(item + 5) + split.to(tl.int64) * (tokens + others) * group + row
            slot = slot * num_kv_heads + kv_head
            place = partials + slot * (D + _ROOM)
            tl.store(place[:, None] + d[None, :], o, mask=used[:, None] & (d < D)[None, :])
            tl.store(place + D, top, mask=used)
            tl.store(place + D + 1, total, mask=used)


@triton.jit
def _merge(  # noqa: PLR0913
    out, lse, items, sinks, partials, num_kv_heads, group, v_scale,
    D: tl.constexpr, DIM: tl.constexpr, LSE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    num_work = tl.load(items) * num_kv_heads
    d = tl.arange(0, DIM)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items + _ITEM * (1 + work // num_kv_heads)
        kv_head = work % num_kv_heads
        first_token, size, part = tl.load(item + 1), tl.load(item + 2), tl.load(item + 4)
        tokens, num_splits = size % 32, size // 256
        if (part % 65536 == 0) & (num_splits > 1):
            row = part // 65536 % 4096 * 16 + tl.arange(0, 16)
            used = row < tokens * group
            slot = (tl.load(item + 5).to(tl.int64) + row) * num_kv_heads + kv_head
            part_row = partials + slot * (D + _ROOM)
            stride = tokens.to(tl.int64) * group * num_kv_heads * (D + _ROOM)
            top = tl.full([16], float("-inf"), tl.float32)
            for s in range(num_splits):
                top = tl.maximum(top, tl.load(part_row + s * stride + D, mask=used, other=0.0))
            base = tl.where(top > float("-inf"), top, 0.0)
            total, o = tl.zeros([16], tl.float32), tl.zeros([16, DIM], tl.float32)
            for s in range(num_splits):
                at = part_row + s * stride
                f = tl.exp2(tl.load(at + D, mask=used, other=0.0) - base)
                total += tl.load(at + D + 1, mask=used, other=0.0) * f
                seen = used[:, None] & (d < D)[None, :]
                part_o = tl.load(at[:, None] + d[None, :], mask=seen, other=0.0)
                o += part_o * f[:, None]
            head = kv_head * group + row % group
            to = (first_token + row // group).to(tl.int64) * (num_kv_heads * group) + head
            finish(out, lse, sinks, to, head, used, o, top, total, v_scale, D, DIM, LSE, SINKS)


def shared_blocks(a: Arguments) -> None:
    """Write how many first blocks each request has in common with the one before it."""
    count = a.seq_lens.shape[0]
    if count:
        _shared[(count,)](a.shared, a.block_table, a.seq_lens, a.block_table.stride(0), CHUNK=128)


def attention_plan(a: Arguments) -> None:
    """Write the table of work items, as the CUDA kernel does."""
    count = a.seq_lens.shape[0]
    _plan[(count + 1,)](
        a.items, a.block_table, a.seq_lens, a.cu_seqlens_q, a.shared, a.block_table.stride(0),
        count, a.items.shape[0] - 1, a.group, a.window, a.max_splits, a.split_blocks, a.few_splits,
        a.longer, a.warp_bits, ALL=triton.next_power_of_2(max(count, 1)),
    )  # fmt: skip


def paged_attention(a: Arguments) -> None:
    """Write out and lse. The mailbox and the counters are not used."""
    options = options_of(a)
    tiles = tiles_that_fit(a.query, 16, _TILE, options["DIM"])
    programs = TILE_ROWS // 2
    if a.query.is_cuda:
        programs = _PROGRAMS * gpu(a.query.device.index).num_multiprocessors
    heads = (a.key_pool.shape[1], a.query.shape[1] // a.key_pool.shape[1])
    _attend[(programs,)](
        a.out, a.lse, a.query, *pools_of(a), a.block_table, a.items, a.sinks, a.partials,
        *strides_of(a).values(), *heads, a.window, a.scale * a.k_scale, a.soft_cap, a.v_scale,
        TILE=_TILE, STAGES=_STAGES[tiles > 1], **options,
    )  # fmt: skip
    merge = {name: options[name] for name in ("D", "DIM", "LSE", "SINKS")}
    _merge[(programs,)](a.out, a.lse, a.items, a.sinks, a.partials, *heads, a.v_scale, **merge)
