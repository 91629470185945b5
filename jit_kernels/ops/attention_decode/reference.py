"""The plan of decode attention and its result, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product, takewhile

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.attention.error import attention_error
from kiln.jit_kernels.ops.attention.reference import scattered
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK
from kiln.jit_kernels.ops.attention_decode.splits import (
    FIRST_IDS,
    PAIR_BLOCKS,
    UNSENT,
    Cut,
    Part,
    SplitRule,
    cut,
    first_unit,
    groups,
    halvings,
    is_decode,
    unit_begin,
)


def shared_reference(a: Arguments) -> Results:
    """Return how many first blocks each request has in common with the one before it."""
    blocks = [-(-length // KV_BLOCK) for length in a.seq_lens.tolist()]
    rows = [row[:count] for row, count in zip(a.block_table.tolist(), blocks, strict=True)]
    pairs = [zip(one, other, strict=False) for one, other in pairwise(rows)]
    equal = [sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], pair)) for pair in pairs]
    shared = [0, *equal] if rows else []
    return {"shared": torch.tensor(shared, dtype=torch.int32, device=a.shared.device)}


def plan_reference(a: Arguments) -> Results:
    """Return the table of work items: a header, then request by request, tile by tile."""
    rule = SplitRule(
        most=a.max_splits, blocks=a.split_blocks, few=a.few_splits, longer=a.longer,
        warp_bits=a.warp_bits,
    )  # fmt: skip
    starts, lengths = a.cu_seqlens_q.tolist(), a.seq_lens.tolist()
    counts = [last - first for first, last in pairwise(starts)]
    cuts = [
        cut(rule, tokens, length, a.group, a.window)
        for tokens, length in zip(counts, lengths, strict=True)
    ]
    divided = Part(Part.SPLIT_IN_UNITS + halvings(rule, cuts))  # of divisible requests
    items: list[tuple[int, ...]] = []
    num_rows = 0  # of partial results
    singles = [range(request, request + 1) for request in range(len(cuts))]
    runs = singles if a.window else groups(rule, cuts, counts, a.shared.tolist(), a.group)
    for run in runs:
        one, tokens, others = cuts[run.start], counts[run.start], len(run) - 1
        kind = divided if one.divisible else Part.SPLIT
        parts = one.num_splits << kind.halvings
        whole = [(run.start, tile, part) for tile in range(one.num_tiles) for part in range(parts)]
        for request, tile, part in whole + [(later, 0, parts - 1) for later in run[1:]]:
            split = part >> kind.halvings
            blocks = (one.begin(split), cuts[request].begin(split + 1))
            shared = others > 0 and part < parts - 1
            size = (1 + others, blocks[1] * KV_BLOCK + len(run)) if shared else (
                others << 5 | tokens, lengths[request])  # fmt: skip
            place = kind << 29 | shared << 28 | tile << 16 | part
            first_row = num_rows + (request - run.start) * a.group
            ids = _first_ids(a.block_table[request], cuts[request], kind, part, rule.warp_bits)
            items.append((
                request, starts[request], parts << 8 | size[0], size[1], place, first_row,
                *blocks, *ids,
            ))  # fmt: skip
        if one.num_tiles and parts > 1:
            num_rows += parts * tokens * a.group * len(run)
    table = a.items.clone()
    header = (min(len(items), len(table) - 1), num_rows, len(runs) < len(cuts), 0)
    table[0, :4] = torch.tensor(header, dtype=table.dtype)
    if items := items[: len(table) - 1]:
        table[1 : 1 + len(items)] = torch.tensor(items, dtype=table.dtype, device=table.device)
    return {"items": table}


def _first_ids(
    table: torch.Tensor, one: Cut, kind: Part, part: int, warp_bits: int
) -> Iterator[int]:
    """Yield the ids of the first pair of blocks of each warp of an item; 0 past the item's end."""
    split = part >> kind.halvings
    begin, end = one.begin(split), one.begin(split + 1)
    pairs = -(-(end - begin) // PAIR_BLOCKS)
    for warp, i in product(range(FIRST_IDS // PAIR_BLOCKS), range(PAIR_BLOCKS)):
        unit = first_unit(kind, part, warp, warp_bits)
        place = begin + unit_begin(unit, pairs, warp_bits) * PAIR_BLOCKS + i
        yield int(table[place]) if place < end else 0


def decode_reference(a: Arguments) -> Results:
    """Return the new out and lse, which do not depend on how the work is split."""
    return scattered(a, is_decode)


def decode_error(a: Arguments, wanted: Results) -> float:
    """Return the error in units of rounding; infinite if a counter or a message was not reset."""
    if a.arrivals.any() or (a.mail != UNSENT).any():
        return float("inf")
    # The kernel converts one-byte pools to fp16.
    fp16 = a.query.dtype == torch.float16 or a.key_pool.dtype != a.query.dtype
    return attention_error(a, wanted, is_decode, fp16_weights=fp16)
