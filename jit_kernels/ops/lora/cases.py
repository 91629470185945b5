"""The cases on which the LoRA kernels are tested and timed.

"ranks" of a case is an index into RANKS, and "gap" is added to the rows' strides.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant

# By part of a site, then by adapter slot.
RANKS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((0, 1, 3, 5, 16, 64, 128),),
    ((3, 0, 16, 5, 0, 1, 0), (1, 5, 16, 0, 3, 0, 0), (0, 0, 64, 5, 16, 128, 0)),
    ((1, 3, 0), (3, 0, 1), (5, 0, 2)),
    ((16,),) * 3,
    ((16,) * 8,) * 3,
    ((16,) * 64,) * 3,
    ((8,),),
    ((64,) * 8,),
)
_MIXED, _MIXED_PARTS, _FEW, _ONE, _EIGHT, _MANY, _SINGLE, _LARGE = range(len(RANKS))
_FAR = 2**40  # an offset that nothing may use


def _shrink(tokens: int, input_size: int, ranks: int, gap: int = 0) -> Sizes:
    width = widest(ranks) + (5 if gap else 0)
    return {
        "tokens": tokens, "input_size": input_size, "width": width, "ranks": ranks, "gap": gap,
    }  # fmt: skip


def _expand(tokens: int, outputs: int, ranks: int, gap: int = 0) -> Sizes:
    parts = len(RANKS[ranks])
    return {"tokens": tokens, "outputs": outputs, "parts": parts, "ranks": ranks, "gap": gap}


def _embedding(tokens: int, vocab_size: int, ranks: int, gap: int = 0) -> Sizes:
    return {"tokens": tokens, "vocab_size": vocab_size, "ranks": ranks, "gap": gap}


def widest(ranks: int) -> int:
    """Return the largest sum of the ranks of an adapter's parts."""
    slots = range(len(RANKS[ranks][0]))
    return max(sum(of_part[slot] for of_part in RANKS[ranks]) for slot in slots)


def all_ranks(ranks: int) -> int:
    """Return the sum of all ranks of all adapters."""
    return sum(sum(of_part) for of_part in RANKS[ranks])


SHRINK_SIZES = [
    _shrink(0, 64, _ONE), _shrink(1, 1, _FEW), _shrink(8, 70, _FEW), _shrink(19, 63, _MIXED, 1),
    _shrink(19, 64, _MIXED_PARTS), _shrink(17, 131, _MIXED_PARTS, 3), _shrink(6, 1032, _FEW, 8),
    _shrink(4, 4104, _FEW), _shrink(259, 45, _FEW, 3),
]  # fmt: skip
EXPAND_SIZES = [
    _expand(0, 64, _ONE), _expand(1, 3, _FEW), _expand(8, 64, _FEW, 3), _expand(19, 33, _MIXED, 1),
    _expand(19, 64, _MIXED_PARTS), _expand(17, 93, _MIXED_PARTS, 2), _expand(3, 4416, _FEW, 8),
    _expand(4, 2051, _FEW), _expand(259, 36, _FEW), _expand(258, 32, _FEW, 4),
]  # fmt: skip
EMBEDDING_SIZES = [
    _embedding(0, 4, _SINGLE), _embedding(1, 1, _SINGLE), _embedding(7, 11, _SINGLE),
    _embedding(23, 37, _MIXED), _embedding(19, 5, _MIXED, 3),
]  # fmt: skip
SHRINK_BENCH_SIZES = [
    _shrink(tokens, 4096, ranks)
    for tokens, ranks in ((1, _ONE), (64, _ONE), (64, _EIGHT), (64, _MANY), (2048, _EIGHT))
]
EXPAND_BENCH_SIZES = [
    _expand(tokens, 6144, ranks)
    for tokens, ranks in ((1, _ONE), (64, _ONE), (64, _EIGHT), (64, _MANY), (2048, _EIGHT))
]
EMBEDDING_BENCH_SIZES = [_embedding(tokens, 32000, _LARGE) for tokens in (1, 64, 2048)]


def shrink_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return tokens of several adapters, some without one; A lies between NaNs."""
    dtype, tokens, size = DTYPES[variant["scalar_t"]], sizes["tokens"], sizes["input_size"]
    pool = _pool(sizes, [size] * len(RANKS[sizes["ranks"]]), dtype, device, stacked=True)
    pool.values.mul_(size**-0.5)
    x = torch.randn(tokens, size + sizes["gap"], device=device).to(dtype)[:, :size]
    return {
        "h": torch.zeros(tokens, sizes["width"], device=device),
        "x": x,
        "adapter_pool": pool.values,
        **_of_tokens(sizes, device),
        "rank_table": pool.ranks,
        "a_table": pool.offsets,
    }


def expand_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return tokens of several adapters, some without one; B lies between NaNs."""
    dtype, tokens, outputs = DTYPES[variant["scalar_t"]], sizes["tokens"], sizes["outputs"]
    ranks, parts = sizes["ranks"], sizes["parts"]
    smaller = outputs // 4  # k and v
    part_sizes = [outputs - (parts - 1) * smaller, *[smaller] * (parts - 1)]
    pool = _pool(sizes, part_sizes, dtype, device, stacked=False)
    of_tokens = _of_tokens(sizes, device)
    h = torch.full((tokens, widest(ranks) + sizes["gap"]), float("nan"), device=device)
    for row, slot in zip(h, of_tokens["token_slots"].tolist(), strict=True):
        if slot >= 0:
            used = sum(of_part[slot] for of_part in RANKS[ranks])
            row[:used] = torch.randn(used, device=device) * max(used, 1) ** -0.5
    starts = [sum(part_sizes[:part]) for part in range(parts + 1)]
    out = torch.randn(tokens, outputs + sizes["gap"], device=device).to(dtype)[:, :outputs]
    return {
        "out": out,
        "h": h,
        "adapter_pool": pool.values,
        **of_tokens,
        "part_starts": torch.tensor(starts, dtype=torch.int32, device=device),
        "rank_table": pool.ranks,
        "scale_table": pool.scales,
        "b_table": pool.offsets,
    }


def embedding_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return token ids of several adapters, some without one; A lies between NaNs."""
    dtype, tokens, ranks = DTYPES[variant["scalar_t"]], sizes["tokens"], sizes["ranks"]
    pool = _pool(sizes, [sizes["vocab_size"]], dtype, device, stacked=True)
    return {
        "h": torch.zeros(tokens, widest(ranks) + sizes["gap"], device=device),
        "token_ids": torch.randint(sizes["vocab_size"], (tokens,), device=device),
        "adapter_pool": pool.values,
        **_of_tokens(sizes, device),
        "rank_table": pool.ranks,
        "a_table": pool.offsets,
    }


class _Pool(NamedTuple):
    """Weights between NaNs, and tables with more rows than the site has parts."""

    values: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor


def _pool(
    sizes: Sizes, part_sizes: list[int], dtype: torch.dtype, device: str, *, stacked: bool
) -> _Pool:
    """Lay out a weight [rank, size] for each adapter and part; ``stacked``: without gaps."""
    ranks = RANKS[sizes["ranks"]]
    align, slots, table_rows = 16 // dtype.itemsize, len(ranks[0]), 2 * len(ranks) + 1
    values, end = [torch.full((align,), float("nan"))], align
    rank_table = torch.full((table_rows, slots), 2**20, dtype=torch.int32)
    scale_table = torch.full((table_rows, slots), float("nan"))
    offsets = torch.full((table_rows, slots), _FAR)
    for slot in range(slots):
        for part, row in enumerate(_rows(len(ranks))):
            rank = rank_table[row, slot] = ranks[part][slot]
            if rank:
                offsets[row, slot], scale_table[row, slot] = end, 0.5 + float(torch.rand(()))
                values.append(torch.randn(int(rank) * part_sizes[part]))
                end += len(values[-1])
            if not stacked or part + 1 == len(ranks):
                values.append(torch.full((-end % align + align,), float("nan")))
                end += len(values[-1])
    tensors = torch.cat(values).to(dtype), rank_table, scale_table, offsets
    return _Pool(*(tensor.to(device) for tensor in tensors))


def _rows(parts: int) -> list[int]:
    """Return the rows of the site's parts in the tables."""
    return list(range(parts + 1, 2 * parts + 1))


def _of_tokens(sizes: Sizes, device: str) -> dict[str, torch.Tensor]:
    """Return ragged segments of adapters, with tokens without one between and behind them."""
    ranks, tokens = RANKS[sizes["ranks"]], sizes["tokens"]
    slots: list[int] = []
    if tokens > 1:
        lengths = cycle((5, 1, 9, 2) if tokens > 256 else (1, 2, 1))
        order = cycle((*range(len(ranks[0])), -1))
        while len(slots) < tokens - 1:
            slots += [next(order)] * next(lengths)
        slots = [*slots[: tokens - 1], -1]  # the last is padding
    else:
        slots = [0] * tokens
    return {
        "token_slots": torch.tensor(slots, dtype=torch.int32, device=device),
        "rows": torch.tensor(_rows(len(ranks)), dtype=torch.int32, device=device),
    }
