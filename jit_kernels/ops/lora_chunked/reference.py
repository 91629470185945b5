"""What adapters add, in torch, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results


class _Part(NamedTuple):
    """One part of a site in the adapter of a chunk."""

    tokens: torch.Tensor  # int64, those of the chunk
    row: int  # of the tables: its place among the site's parts
    slot: int
    rank: int
    column: int  # of h


def shrink_reference(a: Arguments) -> Results:
    """Return h [tokens, width]; elements without a rank keep their values."""
    h = a.h.clone()
    for part in _parts(a):
        weights = _weights(a, a.a_table, part, a.x.shape[1]).to(h.dtype)
        own = a.x[part.tokens].to(h.dtype) @ weights.T
        h[part.tokens, part.column : part.column + part.rank] = own
    return {"h": h}


def expand_reference(a: Arguments) -> Results:
    """Return out [tokens, outputs]; each sum is rounded once, when it is added."""
    out, starts = a.out.clone(), (0, a.end0, a.end1, a.out.shape[1])
    for part in _parts(a):
        start, end = starts[part.row], starts[part.row + 1]
        weights = _weights(a, a.b_table, part, end - start).to(a.h.dtype)
        own = a.h[part.tokens, part.column : part.column + part.rank]
        more = (own @ weights) * a.scale_table[part.row, part.slot]
        out[part.tokens, start:end] = (out[part.tokens, start:end].to(more.dtype) + more).to(
            out.dtype
        )
    return {"out": out}


def _parts(a: Arguments) -> Iterator[_Part]:
    """Yield each part that has a rank, of each chunk that has an adapter."""
    ranks = a.rank_table.tolist()
    num_tokens = len(a.x if hasattr(a, "x") else a.out)
    chunks = a.sorted_token_ids.view(len(a.chunk_slots), -1)
    for ids, slot in zip(chunks, a.chunk_slots.tolist(), strict=True):
        tokens = ids[ids < num_tokens].long()
        column = 0
        for row, of_part in enumerate(ranks if slot >= 0 else ()):
            if of_part[slot]:
                yield _Part(tokens, row, slot, of_part[slot], column)
            column += of_part[slot]


def _weights(a: Arguments, offsets: torch.Tensor, part: _Part, size: int) -> torch.Tensor:
    """Return a part's A or B as [rank, size]."""
    start = int(offsets[part.row, part.slot])
    weights: torch.Tensor = a.adapter_pool[start : start + part.rank * size]
    return weights.view(part.rank, size)
