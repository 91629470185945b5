"""An adapter on the host, in one tensor laid out as in the adapter pool.

    an adapter    A of q | A of k | A of v | B of q | B of k | B of v | the next site …

Each pair takes the memory of its own rank. The A of the parts of a site, such as q, k and v, follow
each other, so that one product computes all of them. Else each begins at a multiple of 16 bytes.

    A of a projection    [rank, input_size]         A of the embedding    [vocab_size, rank]
    B                    [rank, output_size]

With tensor parallelism a process keeps what belongs to its part of each layer:

    layer                          A                    B
    q, k, v, gate, up, LM head     whole                its outputs
    o, down, embedding             its inputs           whole
    others                         whole                whole

Where A is split, each process adds a partial sum. The all-reduce of the layer adds these up too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.sites import Kind, Part, Site

ALIGNMENT = 16  # bytes: kernels read so many at once


class PackedPair(NamedTuple):
    """Where the pair of a part is, in elements from the start of its adapter."""

    row: int
    a: int
    b: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """A checked adapter. ``values``: [num_elements] in the model's dtype, on the host."""

    name: str
    pairs: tuple[PackedPair, ...]
    values: torch.Tensor

    @property
    def max_rank(self) -> int:
        """The largest rank of its pairs."""
        return max(pair.rank for pair in self.pairs)


def pack(adapter: Adapter, sites: Sequence[Site], dtype: torch.dtype) -> PackedAdapter:
    """Return this process's share of an adapter in one tensor.

    ``adapter`` has all of A and B. Where a layer is larger than its share there are zeros.
    """
    align = ALIGNMENT // dtype.itemsize
    places: list[tuple[Site, Part, LoRAPair]] = []
    pairs: list[PackedPair] = []
    end = 0
    for site in sites:
        own = [(part, adapter.pairs[part.row]) for part in site.parts if part.row in adapter.pairs]
        starts = []
        for _, pair in own:
            starts.append(end)
            end += pair.rank * site.input_size
        for (part, pair), start in zip(own, starts, strict=True):
            end = _aligned(end, align)
            places.append((site, part, pair))
            pairs.append(PackedPair(part.row, start, end, pair.rank, pair.scale))
            end += pair.rank * part.output_size
        end = _aligned(end, align)
    values = torch.zeros(end, dtype=dtype)
    for (site, part, pair), at in zip(places, pairs, strict=True):
        _fill(values, at, site.kind, part, pair)
    return PackedAdapter(adapter.name, tuple(pairs), values)


def _fill(values: torch.Tensor, at: PackedPair, kind: Kind, part: Part, pair: LoRAPair) -> None:
    """Write the process's share of a pair to its place."""
    a = values[at.a : at.a + pair.rank * part.input_size]
    a = a.view(-1, pair.rank).T if kind is Kind.EMBEDDING else a.view(pair.rank, -1)
    a[:, : part.inputs.size] = pair.a[:, part.inputs.place]
    b = values[at.b : at.b + pair.rank * part.output_size].view(pair.rank, -1)
    runs = b.split([share.room for share in part.outputs], dim=1)
    for share, own in zip(part.outputs, runs, strict=True):
        own[:, : share.size] = pair.b[share.place].T
    if part.order:
        b.copy_(b[:, list(part.order)])


def _aligned(end: int, align: int) -> int:
    return -(-end // align) * align
