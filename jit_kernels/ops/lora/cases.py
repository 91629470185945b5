"""The cases on which the LoRA kernels are tested and timed.

"ranks" of a case is an index into RANKS, and "gap" is added to the rows' strides. "lift" is the
power of two by which h of lora_expand is larger than usual, and the scales smaller. "cancels": its
sums are large and out is near minus their value, so that lost digits of h show.
"""

from __future__ import annotations

from itertools import accumulate, cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.lora.reference import expand_reference
from kiln.jit_kernels.ops.lora.split import make_workspace
from kiln.jit_kernels.ops.lora.tiles import (
    fill_tiles,
    num_elements,
    num_tiles,
    tile_of,
    tiles_in,
)

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
    ((20, 70, 33), (6, 0, 81)),
    ((0, 1), (3, 16), (2, 0)),
    ((16, 4, 20, 0, 2, 0), (0, 64, 4, 36, 16, 0), (8, 20, 0, 16, 2, 2)),  # most are multiples of 4
)
_MIXED, _MIXED_PARTS, _FEW, _ONE, _EIGHT, _MANY, _SINGLE, _LARGE, UNEVEN, _TWO, _FOURS = range(
    len(RANKS)
)
_FAR = 2**40  # an offset that nothing may use


def _shrink(tokens: int, input_size: int, ranks: int, gap: int = 0) -> Sizes:
    width = widest(ranks) + (5 if gap else 0)
    return {
        "tokens": tokens, "input_size": input_size, "width": width, "ranks": ranks, "gap": gap,
        **_tiling(tokens, ranks),
    }  # fmt: skip


def _expand(tokens: int, outputs: int, ranks: int, gap: int = 0, **more: int) -> Sizes:
    return {
        "tokens": tokens, "outputs": outputs, "parts": len(RANKS[ranks]), "ranks": ranks,
        "gap": gap, **_tiling(tokens, ranks), **more,
    }  # fmt: skip


def _embedding(tokens: int, vocab_size: int, ranks: int, gap: int = 0) -> Sizes:
    return {
        "tokens": tokens, "vocab_size": vocab_size, "ranks": ranks, "gap": gap,
        **_tiling(tokens, ranks),
    }  # fmt: skip


def _tiling(tokens: int, ranks: int) -> Sizes:
    return {"tiles": num_tiles(tokens, len(RANKS[ranks][0])), "tile": tile_of(tokens)}


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
# All cases; the family lora_chunked runs only those above. A step of 68 tokens has an adapter with
# 17 tokens, one with 16 and one with 33.
TILED_SHRINK_SIZES = [
    *SHRINK_SIZES, _shrink(68, 40, _FEW), _shrink(3, 24, _MIXED), _shrink(2, 14336, _FEW),
    _shrink(257, 2056, _TWO), _shrink(5, 40, _FEW, 3),
]  # fmt: skip
TILED_EXPAND_SIZES = [
    *EXPAND_SIZES, _expand(68, 40, _FEW), _expand(258, 64, UNEVEN), _expand(9, 49, UNEVEN, 1),
    _expand(19, 64, _FOURS, lift=20), _expand(19, 64, _FOURS, lift=-20),
    _expand(19, 64, _FOURS, cancels=1), _expand(25, 448, _FOURS), _expand(258, 96, _FOURS),
    _expand(9, 52, _FOURS, 4), _expand(9, 64, _FOURS, 4),
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
    workspace = make_workspace(num_tiles(tokens, slots_of(sizes)), sizes["width"], device)
    x = torch.randn(tokens, size + sizes["gap"], device=device).to(dtype)[:, :size]
    return {
        "h": torch.zeros(tokens, sizes["width"], device=device),
        "x": x,
        "adapter_pool": pool.values,
        **tiles_of(token_slots(sizes), slots_of(sizes), device),
        "rank_table": pool.ranks,
        "a_table": pool.offsets,
        "partials": workspace.partials,
        "arrivals": workspace.arrivals,
    }


def expand_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return tokens of several adapters, some without one; B lies between NaNs."""
    dtype, tokens, outputs = DTYPES[variant["scalar_t"]], sizes["tokens"], sizes["outputs"]
    ranks, parts = sizes["ranks"], sizes["parts"]
    smaller = outputs // 4  # k and v
    part_sizes = [outputs - (parts - 1) * smaller, *[smaller] * (parts - 1)]
    pool = _pool(sizes, part_sizes, dtype, device, stacked=False)
    slots = token_slots(sizes)
    h = torch.full((tokens, widest(ranks) + sizes["gap"]), float("nan"), device=device)
    for row, slot in zip(h, slots, strict=True):
        if slot >= 0:
            used = sum(of_part[slot] for of_part in RANKS[ranks])
            row[:used] = torch.randn(used, device=device) * max(used, 1) ** -0.5
    end0, end1, *_ = (*accumulate(part_sizes), outputs)
    out = torch.randn(tokens, outputs + sizes["gap"], device=device).to(dtype)[:, :outputs]
    made = {
        "out": out,
        "h": h,
        "adapter_pool": pool.values,
        **tiles_of(slots, slots_of(sizes), device),
        "end0": end0,
        "end1": end1,
        "rank_table": pool.ranks,
        "scale_table": pool.scales,
        "b_table": pool.offsets,
    }
    lift = 2.0 ** sizes.get("lift", 0)
    h *= lift
    pool.scales.div_(lift)
    if sizes.get("cancels", 0):
        _cancel(made)
    return made


def _cancel(made: dict[str, Any]) -> None:
    """Set out to minus what is added, rounded; sums of 16-bit dtypes are up to about 100."""
    out = made["out"]
    made["scale_table"].mul_(16.0 if out.dtype.itemsize == 2 else 1.0)
    zeros = torch.zeros_like(out, dtype=torch.float32)
    more = expand_reference(SimpleNamespace(**{**made, "out": zeros}))["out"]
    out.copy_(-more)


def embedding_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return token ids of several adapters, some without one; A lies between NaNs."""
    dtype, tokens, ranks = DTYPES[variant["scalar_t"]], sizes["tokens"], sizes["ranks"]
    pool = _pool(sizes, [sizes["vocab_size"]], dtype, device, stacked=True)
    return {
        "h": torch.zeros(tokens, widest(ranks) + sizes["gap"], device=device),
        "token_ids": torch.randint(sizes["vocab_size"], (tokens,), device=device),
        "adapter_pool": pool.values,
        **tiles_of(token_slots(sizes), slots_of(sizes), device),
        "rank_table": pool.ranks,
        "a_table": pool.offsets,
    }


class _Pool(NamedTuple):
    """Weights between NaNs, and where they are."""

    values: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor


def _pool(
    sizes: Sizes, part_sizes: list[int], dtype: torch.dtype, device: str, *, stacked: bool
) -> _Pool:
    """Lay out a weight [rank, size] for each adapter and part; ``stacked``: without gaps."""
    ranks = RANKS[sizes["ranks"]]
    align, slots = 16 // dtype.itemsize, len(ranks[0])
    values, end = [torch.full((align,), float("nan"))], align
    rank_table = torch.tensor(ranks, dtype=torch.int32)
    scale_table = torch.full(rank_table.shape, float("nan"))
    offsets = torch.full(rank_table.shape, _FAR)
    for slot in range(slots):
        for part, of_part in enumerate(ranks):
            rank = of_part[slot]
            if rank:
                offsets[part, slot], scale_table[part, slot] = end, 0.5 + float(torch.rand(()))
                values.append(torch.randn(rank * part_sizes[part]))
                end += len(values[-1])
            if not stacked or part + 1 == len(ranks):
                values.append(torch.full((-end % align + align,), float("nan")))
                end += len(values[-1])
    tensors = torch.cat(values).to(dtype), rank_table, scale_table, offsets
    return _Pool(*(tensor.to(device) for tensor in tensors))


def slots_of(sizes: Sizes) -> int:
    """Return the adapter slots of a case."""
    return len(RANKS[sizes["ranks"]][0])


def token_slots(sizes: Sizes) -> list[int]:
    """Return adapter slots in ragged segments, with tokens without one between and behind them."""
    tokens = sizes["tokens"]
    if tokens <= 1:
        return [0] * tokens
    slots: list[int] = []
    runs = (5, 1, 9, 2, 40) if tokens > 256 else (17, 16, 33, 1) if tokens > 64 else (1, 2, 1)
    lengths = cycle(runs)
    order = cycle((*range(slots_of(sizes)), -1))
    while len(slots) < tokens - 1:
        slots += [next(order)] * next(lengths)
    return [*slots[: tokens - 1], -1]  # the last is padding


def tiles_of(slots: list[int], num_slots: int, device: str) -> dict[str, torch.Tensor]:
    """Return the tiles of tokens with these adapter slots, as arguments of a kernel."""
    numbers = np.empty(num_elements(len(slots), num_slots), np.int32)
    fill_tiles(numbers, np.array(slots, np.int32), len(slots), num_slots)
    tiles = tiles_in(torch.from_numpy(numbers).to(device), len(slots), num_slots)
    return {"tile_slots": tiles.slots, "tile_tokens": tiles.tokens}
