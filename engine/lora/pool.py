"""The adapter pool: the weights of all loaded adapters in one tensor, and tables of where they are.

    an adapter    A of q | A of k | A of v | B of q | B of k | B of v | the next site …

Each pair takes the memory of its own rank. The A of the parts of a site, such as q, k and v, follow
each other, so that one product computes all of them. Else each begins at a multiple of 16 bytes.

    A of a projection    [rank, input_size]         A of the embedding    [vocab_size, rank]
    B                    [rank, output_size]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kiln.engine.lora.adapter import Adapter
from kiln.engine.lora.sites import Kind, Part, Site

_ALIGNMENT = 16  # bytes: kernels read so many at once


class _Place(NamedTuple):
    """Where a pair goes, in elements from the start of its adapter."""

    site: Site
    part: Part
    a: int
    b: int


class AdapterPool:
    """The adapters in the slots 0 to ``num_slots - 1``.

    ``values``: [num_elements], the weights in the model's dtype. The tables are
    [num_parts, num_slots], by row of a part and by adapter slot: ``ranks`` int32, ``scales``
    float32, ``a_offsets`` and ``b_offsets`` int64, in elements of ``values``. A part that an
    adapter lacks, and each part of an empty slot, has rank 0: nothing there can be read.
    ``version`` changes with every change of the tables, so that copies of them can follow.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        num_slots: int,
        num_elements: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._sites = sites
        self._align = _ALIGNMENT // dtype.itemsize
        shape = (sum(len(site.parts) for site in sites), num_slots)
        self.values = torch.zeros(num_elements, dtype=dtype, device=device)
        self.ranks = np.zeros(shape, np.int32)
        self.scales = np.zeros(shape, np.float32)
        self.a_offsets = np.zeros(shape, np.int64)
        self.b_offsets = np.zeros(shape, np.int64)
        self.version = 0

    @classmethod
    def holding(
        cls,
        adapters: Sequence[Adapter],
        sites: Sequence[Site],
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdapterPool:
        """Return a pool of the size of some adapters, with each in the slot of its index."""
        align = _ALIGNMENT // dtype.itemsize
        sizes = [_layout(adapter, sites, align)[1] for adapter in adapters]
        pool = cls(sites, len(adapters), sum(sizes), dtype, device)
        start = 0
        for slot, (adapter, size) in enumerate(zip(adapters, sizes, strict=True)):
            pool.place(adapter, slot, start)
            start += size
        return pool

    def place(self, adapter: Adapter, slot: int, start: int) -> None:
        """Copy an adapter to the elements from ``start`` on, and make it that of a slot."""
        self.clear(slot)
        places, _ = _layout(adapter, self._sites, self._align)
        for site, part, a, b in places:
            pair, row = adapter.pairs[part.row], part.row
            self._write(start + a, pair.a.T if site.kind is Kind.EMBEDDING else pair.a)
            self._write(start + b, pair.b.T)
            self.a_offsets[row, slot], self.b_offsets[row, slot] = start + a, start + b
            self.scales[row, slot], self.ranks[row, slot] = pair.scale, pair.rank
        self.version += 1

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.ranks[:, slot] = 0
        self.version += 1

    def site_ranks(self, site: Site, slot: int) -> list[int]:
        """Return the ranks of a site's parts in a slot."""
        first = site.parts[0].row
        return [int(rank) for rank in self.ranks[first : first + len(site.parts), slot]]

    def stacked_a(self, site: Site, slot: int) -> torch.Tensor:
        """Return the A of all parts of a projection, [sum of ranks, input_size].

        The slot must have at least one of them.
        """
        ranks = self.site_ranks(site, slot)
        first = next(part for part, rank in zip(site.parts, ranks, strict=True) if rank)
        return self._view(self.a_offsets[first.row, slot], sum(ranks), site.input_size)

    def embedding_a(self, site: Site, slot: int) -> torch.Tensor:
        """Return the A of the embedding, [vocab_size, rank]."""
        (rank,), (part,) = self.site_ranks(site, slot), site.parts
        return self._view(self.a_offsets[part.row, slot], site.input_size, rank)

    def b(self, part: Part, slot: int) -> torch.Tensor:
        """Return the B of a part, [rank, output_size]."""
        rank = int(self.ranks[part.row, slot])
        return self._view(self.b_offsets[part.row, slot], rank, part.output_size)

    def _view(self, start: int, rows: int, columns: int) -> torch.Tensor:
        return self.values[start : start + rows * columns].view(rows, columns)

    def _write(self, start: int, tensor: torch.Tensor) -> None:
        self.values[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def _layout(adapter: Adapter, sites: Sequence[Site], align: int) -> tuple[list[_Place], int]:
    """Return the place of each pair of an adapter, and the number of elements of all."""
    places, end = [], 0
    for site in sites:
        own = [(part, adapter.pairs[part.row]) for part in site.parts if part.row in adapter.pairs]
        starts = []
        for _, pair in own:
            starts.append(end)
            end += pair.a.numel()
        for (part, pair), start in zip(own, starts, strict=True):
            end = -(-end // align) * align
            places.append(_Place(site, part, start, end))
            end += pair.b.numel()
        end = -(-end // align) * align
    return places, end
