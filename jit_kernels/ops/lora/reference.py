"""What adapters add, in torch, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import largest_error
from kiln.jit_kernels.declare.spec import Results


class _Part(NamedTuple):
    """One part of a site in a token's adapter."""

    row: int  # of the tables: its place among the site's parts
    slot: int
    rank: int
    column: int  # of h


def shrink_reference(a: Arguments) -> Results:
    """Return h [tokens, width]; elements without a rank keep their values."""
    h = a.h.clone()
    for token, part in _parts(a):
        weights = _weights(a, a.a_table, part, part.rank, a.x.shape[1])
        row = weights.to(h.dtype) @ a.x[token].to(h.dtype)
        h[token, part.column : part.column + part.rank] = row
    return {"h": h}


def expand_reference(a: Arguments) -> Results:
    """Return out [tokens, outputs]; each sum is rounded once, when it is added."""
    out, starts = a.out.clone(), (0, a.end0, a.end1, a.out.shape[1])
    for token, part in _parts(a):
        start, end = starts[part.row], starts[part.row + 1]
        weights = _weights(a, a.b_table, part, part.rank, end - start).to(a.h.dtype)
        own = a.h[token, part.column : part.column + part.rank]
        more = (own @ weights) * a.scale_table[part.row, part.slot]
        out[token, start:end] = (out[token, start:end].to(more.dtype) + more).to(out.dtype)
    return {"out": out}


def embedding_reference(a: Arguments) -> Results:
    """Return h [tokens, width]; elements without a rank keep their values."""
    h, ids = a.h.clone(), a.token_ids.tolist()
    for token, part in _parts(a):
        start = int(a.a_table[part.row, part.slot]) + ids[token] * part.rank
        h[token, : part.rank] = a.adapter_pool[start : start + part.rank].to(h.dtype)
    return {"h": h}


def error_but_for_gaps(a: Arguments, wanted: Results) -> float:
    """Return the largest error of h; elements that must keep a NaN agree if they are NaN."""
    got, want = a.h, wanted["h"]
    kept = got.isnan() & want.isnan()
    return largest_error(got.masked_fill(kept, 0.0), want.masked_fill(kept, 0.0))


def shrink_error(a: Arguments, wanted: Results) -> float:
    """Return the largest error of h; infinite if a counter was not reset."""
    return float("inf") if a.arrivals.any() else error_but_for_gaps(a, wanted)


def _parts(a: Arguments) -> Iterator[tuple[int, _Part]]:
    """Yield each token that has an adapter, with each part that has a rank."""
    ranks = a.rank_table.tolist()
    for slot, tokens in zip(a.tile_slots.tolist(), a.tile_tokens.tolist(), strict=True):
        column = 0
        for part, of_part in enumerate(ranks if slot >= 0 else ()):
            if of_part[slot]:
                own = _Part(part, slot, of_part[slot], column)
                yield from ((token, own) for token in tokens if token >= 0)
            column += of_part[slot]


def _weights(
    a: Arguments, offsets: torch.Tensor, part: _Part, rank: int, size: int
) -> torch.Tensor:
    """Return a part's A or B as [rank, size]."""
    start = int(offsets[part.row, part.slot])
    weights: torch.Tensor = a.adapter_pool[start : start + rank * size]
    return weights.view(rank, size)
