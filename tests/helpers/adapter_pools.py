"""Adapter pools whose adapters were written at once, without a store."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.engine.lora.adapter import Adapter
from kiln.engine.lora.copying import copy
from kiln.engine.lora.packing import PackedAdapter, pack
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Site


def write(pool: AdapterPool, adapter: PackedAdapter, start: int) -> None:
    """Copy an adapter to the elements from ``start`` on. No slot has these elements yet."""
    copy(adapter.values, pool.values[start : start + adapter.values.numel()])


def pool_of(
    adapters: Sequence[Adapter], sites: Sequence[Site], dtype: torch.dtype, device: torch.device
) -> AdapterPool:
    """Return a pool of the size of some adapters, with each in the slot of its index."""
    packed = [pack(adapter, sites, dtype) for adapter in adapters]
    sizes = [each.values.numel() for each in packed]
    pool = AdapterPool(sites, len(adapters), sum(sizes), dtype, device)
    start = 0
    for slot, (each, size) in enumerate(zip(packed, sizes, strict=True)):
        write(pool, each, start)
        pool.place(each, slot, start)
        start += size
    return pool
