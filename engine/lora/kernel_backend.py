"""The adapters' parts by kernels: two launches a projection, whatever adapters a step has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from kiln.engine.lora.backend import BaseLoRABackend, Layer
from kiln.engine.lora.batch_info import NO_ADAPTER, LoRABatchInfo
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Site
from kiln.jit_kernels.ops.lora.functions import (
    PoolTables,
    lora_expand,
    lora_shrink,
    lora_shrink_embedding,
)
from kiln.jit_kernels.ops.lora.spec import LORA_EXPAND, LORA_SHRINK, LORA_SHRINK_EMBEDDING
from kiln.jit_kernels.ops.lora.split import make_workspace
from kiln.jit_kernels.ops.lora.tiles import (
    MOST_SMALL,
    Tiles,
    fill_tiles,
    num_elements,
    num_tiles,
    tiles_in,
)

_VECTOR = 4  # elements of h that lora_expand loads at once; rows of h begin at a multiple


class KernelLoRA(BaseLoRABackend):
    """Runs the operators of the family ``lora``, with float32 between A and B.

    The kernels find the ranks, scales and weights of a tile's adapter in tables on the device. The
    tables, and the tiles of a step's tokens, keep their addresses. ``max_tokens``: of a step.
    ``overlap``: in a CUDA graph, A runs beside the layer.

    A graph keeps the widths of h that were reserved before its capture. An adapter in the pool may
    need wider ones, which steps without a graph then have. A kernel reads the tables only at the
    adapters of its tokens, so a graph serves a step if each adapter of that step fits.
    """

    name = "kernels"
    kernels = frozenset((LORA_SHRINK, LORA_EXPAND, LORA_SHRINK_EMBEDDING))  # that it calls

    def __init__(
        self, pool: AdapterPool, sites: Sequence[Site], max_tokens: int, *, overlap: bool = True
    ) -> None:
        super().__init__(pool)
        device = pool.values.device
        self._num_slots = pool.ranks.shape[1]
        on_host = (pool.ranks, pool.scales, pool.a_offsets, pool.b_offsets)
        self._tables = [torch.empty_like(torch.from_numpy(one), device=device) for one in on_host]
        self._of_site = {site: _tables_of(site, pool, self._tables) for site in sites}
        # Tiles of all tokens of a step, and behind them of those that the LM head sees.
        most = max(num_elements(tokens, self._num_slots) for tokens in range(max_tokens + 1))
        self._numbers = torch.full((2 * most,), -1, dtype=torch.int32, device=device)
        self._part_ends = {
            site: [part.output_start + part.output_size for part in site.parts] for site in sites
        }
        self._first_rows = [site.parts[0].row for site in sites]
        self._graph_widths = np.zeros(len(sites), np.int64)  # of h in graphs, by site
        self._widths = dict.fromkeys(sites, 0)  # of h in steps without a graph, never smaller
        self._misfits: frozenset[int] = frozenset()  # slots of adapters that do not fit in graphs
        self._most_tiles = num_tiles(min(max_tokens, MOST_SMALL), self._num_slots)
        self._workspace_width = 0
        self._workspace = make_workspace(0, 0, device)
        self._graph_workspace = self._workspace  # held for graphs, which keep only its address
        self._version = -1
        overlaps = overlap and device.type == "cuda"
        self._beside = torch.cuda.Stream(device) if overlaps else None  # of low priority
        self._follow_pool()

    def reserve_rank(self, rank: int) -> None:
        """Let graphs that are captured later fit every adapter of up to this rank."""
        self._reserve(np.array([rank * len(site.parts) for site in self._widths]))

    def reserve_loaded(self) -> None:
        """Let graphs that are captured later fit the adapters that are in the pool now."""
        self._reserve(self._needed_widths().max(axis=1, initial=0))

    @property
    def graphs_fit_any(self) -> bool:
        """Whether graphs fit any adapter: without a reservation they have no room for one."""
        return bool(self._graph_widths.any())

    def graphs_fit(self, slots: Collection[int]) -> bool:
        """Whether graphs fit the adapters that are in these slots now; -1 is no adapter."""
        self._follow_pool()
        return not self._misfits or self._misfits.isdisjoint(slots)

    def _reserve(self, widths: np.ndarray) -> None:
        self._graph_widths = np.maximum(self._graph_widths, _aligned(widths))
        self._version = -1
        self._follow_pool()
        self._graph_workspace = self._workspace

    def _needed_widths(self) -> np.ndarray:
        """Return the width of h that the adapter of each slot needs, [num_sites, num_slots]."""
        return _aligned(np.add.reduceat(self.pool.ranks, self._first_rows, axis=0))

    def fixed_batch(self, num_tokens: int, num_rows: int) -> LoRABatchInfo:
        """Return a batch of a graph's size, whose adapters ``fill_batch`` sets."""
        own = num_elements(num_tokens, self._num_slots)
        pruned = self._info(self._numbers[own:], num_rows)
        return replace(self._info(self._numbers, num_tokens), pruned=pruned)

    def clear_batches(self) -> None:
        """Let fixed batches of every size be padding, until ``fill_batch``."""
        self._numbers.fill_(NO_ADAPTER)

    def fill_batch(
        self,
        info: LoRABatchInfo,
        slots: Sequence[int],
        lengths: Sequence[int],
        samples: Sequence[int],
    ) -> None:
        """Set the adapters of a fixed batch, as in ``prepare_lora_batch``; the rest is padding."""
        self._follow_pool()
        of_tokens, sampling = slots_of_tokens(slots, lengths, samples)
        sizes = [info.num_tokens, self.pruned_batch_info(info).num_tokens]
        ends = np.cumsum([num_elements(size, self._num_slots) for size in sizes])
        host = torch.empty(int(ends[1]), dtype=torch.int32, pin_memory=self._numbers.is_cuda)
        numbers = host.numpy()
        fill_tiles(numbers[: ends[0]], of_tokens, sizes[0], self._num_slots)
        fill_tiles(numbers[ends[0] :], sampling, sizes[1], self._num_slots)
        self._numbers[: len(host)].copy_(host, non_blocking=True)

    def prepare_lora_batch(
        self, slots: Sequence[int], lengths: Sequence[int], samples: Sequence[int]
    ) -> LoRABatchInfo:
        """Return the batch of a step, and send its tiles."""
        info = self.fixed_batch(sum(lengths), sum(samples))
        self.fill_batch(info, slots, lengths, samples)
        return info

    def run_linear(
        self, base: Layer, x: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Do the same; in a CUDA graph A is a branch beside the layer, which has priority."""
        if self._beside is None or not torch.cuda.is_current_stream_capturing():
            super().run_linear(base, x, site, out, info)
            return
        current = torch.cuda.current_stream()
        self._beside.wait_stream(current)
        with torch.cuda.stream(self._beside):
            h = self.run_lora_a_sgemm(x, site, info)
        base()
        current.wait_stream(self._beside)
        self.run_lora_b_sgemm(h, site, out, info)

    def run_lora_a_sgemm(self, x: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        """Return h = A x of all parts of a projection; x: [num_tokens, input_size]."""
        h = self._empty(x, site, info)
        if h.shape[1]:
            lora_shrink(x, self._of_site[site], _tiles(info), h, self._workspace)
        return h

    def run_lora_b_sgemm(
        self, h: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Add scale * B h of each part to its columns of out [num_tokens, output size]."""
        if h.shape[1]:
            lora_expand(h, self._of_site[site], _tiles(info), self._part_ends[site], out)

    def run_lora_a_embedding(
        self, token_ids: torch.Tensor, site: Site, info: LoRABatchInfo
    ) -> torch.Tensor:
        """Return h, the columns of A for token_ids [num_tokens] int64."""
        h = self._empty(token_ids, site, info)
        if h.shape[1]:
            lora_shrink_embedding(token_ids, self._of_site[site], _tiles(info), h)
        return h

    def _info(self, numbers: torch.Tensor, num_tokens: int) -> LoRABatchInfo:
        own = numbers[: num_elements(num_tokens, self._num_slots)]
        tiles = tiles_in(own, num_tokens, self._num_slots)
        return LoRABatchInfo((0, num_tokens), (NO_ADAPTER,), tiles=tiles)

    def _empty(self, rows: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        assert len(rows) == info.num_tokens, "the segments are those of other rows"
        return torch.empty(len(rows), self._widths[site], dtype=torch.float32, device=rows.device)

    def _follow_pool(self) -> None:
        """Copy the pool's tables if they have changed.

        Steps that were launched before still see the old ones.
        """
        pool = self.pool
        if self._version == pool.version:
            return
        self._version = pool.version  # read first: another thread may change the tables meanwhile
        on_host = (pool.ranks, pool.scales, pool.a_offsets, pool.b_offsets)
        for table, own in zip(self._tables, on_host, strict=True):
            host = torch.from_numpy(own)
            # From page-locked memory the copy does not wait for the step that runs.
            table.copy_(host.pin_memory() if table.is_cuda else host, non_blocking=True)
        needed = self._needed_widths()
        misfits = (needed > self._graph_widths[:, None]).any(axis=0)
        self._misfits = frozenset(np.flatnonzero(misfits).tolist())
        widths = np.maximum(self._graph_widths, needed.max(axis=1, initial=0)).tolist()
        self._widths = dict(zip(self._widths, widths, strict=True))
        if max(widths) > self._workspace_width:
            self._workspace_width = max(widths)
            device = self._numbers.device
            self._workspace = make_workspace(self._most_tiles, self._workspace_width, device)


def _aligned(widths: np.ndarray) -> np.ndarray:
    """Return widths at which rows of h begin at a vector."""
    return -(-widths // _VECTOR) * _VECTOR


def slots_of_tokens(
    slots: Sequence[int], lengths: Sequence[int], samples: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the adapter slots of a step's tokens, and of those that need logits; both int32.

    By request, as in ``prepare_lora_batch``.
    """
    of_requests = np.array(slots, np.int32)
    return np.repeat(of_requests, np.array(lengths)), np.repeat(of_requests, np.array(samples))


def _tiles(info: LoRABatchInfo) -> Tiles:
    assert info.tiles is not None, "the batch is another backend's"
    return info.tiles


def _tables_of(site: Site, pool: AdapterPool, tables: Sequence[torch.Tensor]) -> PoolTables:
    """Return the rows of a site's parts, which follow each other."""
    first, count = site.parts[0].row, len(site.parts)
    return PoolTables(pool.values, *(table[first : first + count] for table in tables))
