"""The plan of prefill attention and its result, in torch."""

from __future__ import annotations

from itertools import pairwise

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.attention.error import attention_error
from kiln.jit_kernels.ops.attention.reference import scattered
from kiln.jit_kernels.ops.attention_prefill.tiles import Tiles, is_prefill, ordered_tiles


def plan_reference(a: Arguments) -> Results:
    """Return the table of tiles."""
    requests = zip(pairwise(a.cu_seqlens_q.tolist()), a.seq_lens.tolist(), strict=True)
    tiles = ordered_tiles(
        [Tiles(last - first, length, a.group, a.window) for (first, last), length in requests]
    )
    table = a.items.clone()
    rows = [(min(len(tiles), len(table) - 1), 0, 0, 0), *tiles][: len(table)]
    table[: len(rows)] = torch.tensor(rows, dtype=table.dtype, device=table.device)
    return {"items": table}


def prefill_reference(a: Arguments) -> Results:
    """Return the new out and lse, which do not depend on how the work is split."""
    return scattered(a, is_prefill)


def prefill_error(a: Arguments, wanted: Results) -> float:
    """Return the error in units of rounding; infinite if the counter is not zero again."""
    if a.counter.any():
        return float("inf")
    return attention_error(a, wanted, is_prefill, fp16_weights=a.out.dtype == torch.float16)
