"""The adapters of an engine, applied to the steps that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kiln.engine.config import LoRAConfig
from kiln.engine.lora.backend import BaseLoRABackend
from kiln.engine.lora.batch_info import LoRABatchInfo
from kiln.engine.lora.kernel_backend import KernelLoRA
from kiln.engine.lora.operators import lora_step
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Kind, Site, Sites
from kiln.engine.lora.store import RankStore
from kiln.engine.models.loader import Progress
from kiln.engine.requests.batch import Batch

MakeBackend = Callable[[AdapterPool, Sequence[Site]], BaseLoRABackend]


@dataclass(frozen=True, slots=True)
class _AdapterStep:
    """A step with adapters, as the operators see it."""

    backend: BaseLoRABackend
    sites: Mapping[int, Site]  # by the address of their rows
    info: LoRABatchInfo

    def run_linear(
        self, base: Callable[[], None], x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Run a projection: ``base``, and the adapters' parts."""
        own, backend, info = self.sites[rows.data_ptr()], self.backend, self.info
        if own.kind is Kind.HEAD:
            info = backend.pruned_batch_info(info)
        backend.run_linear(base, x, own, out, info)

    def add_embedding(self, rows: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' parts of the embedding to ``out``."""
        own, backend, info = self.sites[rows.data_ptr()], self.backend, self.info
        h = backend.run_lora_a_embedding(token_ids, own, info)
        backend.run_lora_b_sgemm(h, own, out, info)


class Adapters:
    """The adapters of an engine, and the backend that applies them to steps."""

    def __init__(self, store: RankStore, backend: BaseLoRABackend, sites: Sequence[Site]) -> None:
        self.store = store
        self.backend = backend
        self._sites = {site.rows.data_ptr(): site for site in sites}

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply the adapters of a batch to the layers that run inside a ``with`` block."""
        of = batch.columns
        return self._step_of(of.adapter_slot, of.num_tokens, of.num_samples)

    def rows(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Apply the adapters of single rows, as the LM head sees them, inside a ``with`` block."""
        ones = [1] * len(slots)
        return self._step_of(slots, ones, ones)

    def _step_of(
        self, slots: Sequence[int], lengths: Sequence[int], samples: Sequence[int]
    ) -> AbstractContextManager[None]:
        if max(slots) < 0:
            return nullcontext()
        return self._applied(self.backend.prepare_lora_batch(slots, lengths, samples))

    def _applied(self, info: LoRABatchInfo) -> AbstractContextManager[None]:
        return lora_step(_AdapterStep(self.backend, self._sites, info))

    def reserve_graphs(self) -> bool:
        """Let graphs fit every adapter that is loaded now; return whether they fit any.

        False if the backend has no graphs, or no adapter is loaded and no rank was reserved.
        """
        if not isinstance(self.backend, KernelLoRA):  # it reads a step's segments on the host
            return False
        for _ in self.groups(self.store.num_slots):
            self.backend.reserve_loaded()
        return self.backend.graphs_fit_any

    def fit(self, batch: Batch) -> bool:
        """Whether graphs fit the adapters of a batch."""
        return self._kernels.graphs_fit(batch.columns.adapter_slot)

    def fixed_step(self, num_tokens: int, num_rows: int) -> AbstractContextManager[None]:
        """Apply the adapters that ``fill`` sets, for a graph of this size."""
        return self._applied(self._kernels.fixed_batch(num_tokens, num_rows))

    def clear(self) -> None:
        """Make every fixed step one of padding, until ``fill``."""
        self._kernels.clear_batches()

    def fill(self, batch: Batch, num_tokens: int, num_rows: int) -> None:
        """Set the adapters of the next step of this size."""
        of = batch.columns
        info = self._kernels.fixed_batch(num_tokens, num_rows)
        self._kernels.fill_batch(info, of.adapter_slot, of.num_tokens, of.num_samples)

    @property
    def _kernels(self) -> KernelLoRA:
        assert isinstance(self.backend, KernelLoRA), "graphs were not reserved"
        return self.backend

    def groups(self, most: int) -> Iterator[dict[int, str]]:
        """Yield the names of all adapters by slot, in groups of ``most`` that fit in the pool.

        Each group is in the pool while the caller has it, and at the end the pool is empty.
        If no adapter is loaded, it yields one empty group.
        """
        store, left = self.store, list(self.store.sizes.items())
        most = min(most, store.num_slots)
        while True:
            group: dict[int, str] = {}
            start = 0
            while left and len(group) < most and start + left[0][1] <= store.size:
                name, size = left.pop(0)
                store.copy_now(name, len(group), start)
                group[len(group)] = name
                start += size
            yield group
            for slot in group:
                store.clear(slot)
            if not left:
                return


def load_adapters(
    config: LoRAConfig,
    sites: Sites,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    make_backend: MakeBackend,
) -> Adapters:
    """Load the adapters of a config, and take the memory of the pool.

    ``sites``: those of the model that was built. ``make_backend`` returns what computes the
    adapters' parts.
    Raises AdapterError, or ConfigError.
    """
    store = RankStore(config, sites, dtype, device, progress)
    backend = make_backend(store.pool, sites.all)
    if isinstance(backend, KernelLoRA):
        backend.reserve_rank(config.max_lora_rank or 0)
    return Adapters(store, backend, sites.all)
