"""The adapters' parts by kernels: two launches a projection, whatever adapters a step has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kiln.engine.lora.backend import BaseLoRABackend
from kiln.engine.lora.batch_info import NO_ADAPTER, LoRABatchInfo, make_batch_info
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Site
from kiln.jit_kernels.ops.lora.functions import (
    PoolTables,
    lora_expand,
    lora_shrink,
    lora_shrink_embedding,
)

_CPU = torch.device("cpu")


class KernelLoRA(BaseLoRABackend):
    """Runs the operators of the family ``lora``, with float32 between A and B.

    The kernels find a token's adapter, its ranks, scales and weights in tables on the device. The
    tables, and the adapter slots of a step's tokens, keep their addresses. ``max_tokens``: of a
    step.
    """

    name = "kernels"
    fits_graphs = True

    def __init__(self, pool: AdapterPool, sites: Sequence[Site], max_tokens: int) -> None:
        super().__init__(pool)
        device = pool.values.device
        on_host = (pool.ranks, pool.scales, pool.a_offsets, pool.b_offsets)
        tables = (torch.empty(one.shape, dtype=_dtype(one), device=device) for one in on_host)
        self._tables = PoolTables(pool.values, *tables)
        # Adapter slots of all tokens of a step, and of those that the LM head sees.
        self._token_slots = torch.full((2, max_tokens), -1, dtype=torch.int32, device=device)
        self._part_starts = {site: _part_starts(site) for site in sites}
        self._widths = dict.fromkeys(sites, 0)  # of h
        self._version = -1
        self._layout = 0
        self._follow_pool()

    @property
    def layout(self) -> int:
        """A number that changes if graphs that were captured before must not be replayed."""
        if self._version != self.pool.version:
            self._follow_pool()
        return self._layout

    def reserve_rank(self, rank: int) -> None:
        """Let graphs fit adapters of up to this rank, also of those that are loaded later."""
        for site in self._widths:
            self._widen(site, rank * len(site.parts))

    def _widen(self, site: Site, width: int) -> None:
        """Make h at least so wide. It never shrinks: a captured graph has its width."""
        if width > self._widths[site]:
            self._widths[site] = width
            self._layout += 1

    def fixed_batch(self, num_tokens: int, num_rows: int) -> LoRABatchInfo:
        """Return a batch of a graph's size, whose adapters ``fill_batch`` sets."""
        none = torch.empty(0, dtype=torch.int32)
        pruned = LoRABatchInfo(none, none, (0, num_rows), (NO_ADAPTER,))
        return LoRABatchInfo(none, none, (0, num_tokens), (NO_ADAPTER,), pruned)

    def fill_batch(
        self,
        info: LoRABatchInfo,
        slots: Sequence[int],
        lengths: Sequence[int],
        samples: Sequence[bool],
    ) -> None:
        """Set the adapters of a fixed batch, as in ``prepare_lora_batch``; the rest is padding."""
        if self._version != self.pool.version:
            self._follow_pool()
        own = make_batch_info(slots, lengths, samples, _CPU)
        self._send(own, info)
        self._send(self.pruned_batch_info(own), self.pruned_batch_info(info))

    def prepare_lora_batch(
        self, slots: Sequence[int], lengths: Sequence[int], samples: Sequence[bool]
    ) -> LoRABatchInfo:
        """Return the segments of a step, and send the adapter slots of its tokens."""
        if self._version != self.pool.version:
            self._follow_pool()
        info = make_batch_info(slots, lengths, samples, _CPU)
        for own in (info, self.pruned_batch_info(info)):
            self._send(own, own)
        return info

    def run_lora_a_sgemm(self, x: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        """Return h = A x of all parts of a projection; x: [num_tokens, input_size]."""
        h = self._empty(x, site, info)
        if h.shape[1]:
            lora_shrink(x, self._tables, self._slots_of(info), site.rows, h)
        return h

    def run_lora_b_sgemm(
        self, h: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Add scale * B h of each part to its columns of out [num_tokens, output size]."""
        if h.shape[1]:
            starts = self._part_starts[site]
            lora_expand(h, self._tables, self._slots_of(info), site.rows, starts, out)

    def run_lora_a_embedding(
        self, token_ids: torch.Tensor, site: Site, info: LoRABatchInfo
    ) -> torch.Tensor:
        """Return h, the columns of A for token_ids [num_tokens] int64."""
        h = self._empty(token_ids, site, info)
        if h.shape[1]:
            lora_shrink_embedding(token_ids, self._tables, self._slots_of(info), site.rows, h)
        return h

    def _send(self, own: LoRABatchInfo, place: LoRABatchInfo) -> None:
        """Write the adapter slots of a batch's tokens to a place for as many tokens or more."""
        numbers = np.full(place.num_tokens, NO_ADAPTER, np.int32)
        numbers[: own.num_tokens] = np.repeat(np.array(own.adapters, np.int32), np.diff(own.starts))
        host = torch.from_numpy(numbers)
        if self._token_slots.is_cuda:
            host = host.pin_memory()
        self._slots_of(place).copy_(host, non_blocking=True)

    def _slots_of(self, info: LoRABatchInfo) -> torch.Tensor:
        return self._token_slots[int(info.pruned is None), : info.num_tokens]

    def _empty(self, rows: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        assert len(rows) == info.num_tokens, "the segments are those of other rows"
        return torch.empty(len(rows), self._widths[site], dtype=torch.float32, device=rows.device)

    def _follow_pool(self) -> None:
        """Copy the pool's tables; steps that were launched before still see the old ones."""
        pool = self.pool
        self._version = pool.version  # read first: another thread may change the tables meanwhile
        on_host = (pool.ranks, pool.scales, pool.a_offsets, pool.b_offsets)
        for table, own in zip(self._tables[1:], on_host, strict=True):
            table.copy_(torch.from_numpy(own))
        for site in self._part_starts:
            first = site.parts[0].row
            ranks = pool.ranks[first : first + len(site.parts)].sum(axis=0)
            self._widen(site, int(ranks.max(initial=0)))


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(array).dtype


def _part_starts(site: Site) -> torch.Tensor:
    """Return the first output of each part, and the number of outputs, on the site's device."""
    last = site.parts[-1]
    starts = [*(part.output_start for part in site.parts), last.output_start + last.output_size]
    return torch.tensor(starts, dtype=torch.int32, device=site.rows.device)
