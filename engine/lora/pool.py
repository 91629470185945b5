"""The adapter pool: adapters in one tensor, and tables of where their parts are.

Each adapter is in one piece, laid out as ``kiln.engine.lora.packing`` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kiln.engine.kv.zeros import zeros
from kiln.engine.lora.packing import PackedAdapter
from kiln.engine.lora.sites import Part, Site


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
        shape = (sum(len(site.parts) for site in sites), num_slots)
        self.values = zeros([num_elements], dtype, device)
        self.ranks = np.zeros(shape, np.int32)
        self.scales = np.zeros(shape, np.float32)
        self.a_offsets = np.zeros(shape, np.int64)
        self.b_offsets = np.zeros(shape, np.int64)
        self.version = 0

    def place(self, adapter: PackedAdapter, slot: int, start: int) -> None:
        """Make an adapter, which was copied to the elements from ``start`` on, that of a slot."""
        self.clear(slot)
        for pair in adapter.pairs:
            row = pair.row
            self.a_offsets[row, slot], self.b_offsets[row, slot] = start + pair.a, start + pair.b
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
