"""The interface of what computes the adapters' parts of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch

from kiln.engine.lora.batch_info import NO_ADAPTER, LoRABatchInfo, make_batch_info
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Kind, Site


class BaseLoRABackend(ABC):
    """Adds scale * B A x to the outputs of layers, by segment of a step.

    Each segment uses the ranks and scales of its adapter slot, which differ by part: q, k and v
    have their own. A part of rank 0 adds nothing. ``name`` is what ``kernels`` reports.

    ``h``, between A and B, is [num_tokens, width], where width is at least the sum of the ranks of
    a site's parts; the columns of the parts follow each other without gaps. Tokens without an
    adapter may hold anything.
    """

    name: str
    fits_graphs = False  # whether a CUDA graph of a step can be replayed for any adapters

    def __init__(self, pool: AdapterPool) -> None:
        self.pool = pool

    def reserve_rank(self, rank: int) -> None:  # noqa: B027 (backends without graphs need nothing)
        """Let graphs that are captured later fit every adapter of up to this rank."""

    def reserve_loaded(self) -> None:  # noqa: B027 (backends without graphs need nothing)
        """Let graphs that are captured later fit the adapters that are in the pool now."""

    @property
    def graphs_fit_any(self) -> bool:
        """Whether graphs fit any adapter: without a reservation they have no room for one."""
        return False

    def graphs_fit(self, slots: Collection[int]) -> bool:
        """Whether graphs fit the adapters that are in these slots now; -1 is no adapter."""
        return set(slots) <= {NO_ADAPTER}

    def fixed_batch(self, num_tokens: int, num_rows: int) -> LoRABatchInfo:
        """Return a batch of a graph's size, whose adapters ``fill_batch`` sets.

        Raises NotImplementedError unless ``fits_graphs``.
        """
        raise NotImplementedError(f"{self.name} reads a step's segments on the host")

    def clear_batches(self) -> None:
        """Let fixed batches of every size be padding, until ``fill_batch``.

        Raises NotImplementedError unless ``fits_graphs``.
        """
        raise NotImplementedError(f"{self.name} reads a step's segments on the host")

    def fill_batch(
        self,
        info: LoRABatchInfo,
        slots: Sequence[int],
        lengths: Sequence[int],
        samples: Sequence[int],
    ) -> None:
        """Set the adapters of a fixed batch, as in ``prepare_lora_batch``; the rest is padding.

        Raises NotImplementedError unless ``fits_graphs``.
        """
        raise NotImplementedError(f"{self.name} reads a step's segments on the host")

    def prepare_lora_batch(
        self, slots: Sequence[int], lengths: Sequence[int], samples: Sequence[int]
    ) -> LoRABatchInfo:
        """Return the segments of a step; see make_batch_info."""
        return make_batch_info(slots, lengths, samples)

    def pruned_batch_info(self, info: LoRABatchInfo) -> LoRABatchInfo:
        """Return the segments of the rows that the LM head sees."""
        assert info.pruned is not None, "already pruned"
        return info.pruned

    @abstractmethod
    def run_lora_a_sgemm(self, x: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        """Return h = A x of all parts of a projection; x: [num_tokens, input_size]."""

    @abstractmethod
    def run_lora_b_sgemm(
        self, h: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Add scale * B h of each part to its columns of out [num_tokens, output size]."""

    @abstractmethod
    def run_lora_a_embedding(
        self, token_ids: torch.Tensor, site: Site, info: LoRABatchInfo
    ) -> torch.Tensor:
        """Return h, the columns of A for token_ids [num_tokens] int64."""

    def run_linear(
        self,
        base: Callable[[], None],
        x: torch.Tensor,
        site: Site,
        out: torch.Tensor,
        info: LoRABatchInfo,
    ) -> None:
        """Call ``base``, which writes the layer without adapters to out, and add their parts.

        x: [num_tokens, input_size]; out: [num_tokens, output size].
        """
        base()
        match site.kind:
            case Kind.QKV:
                self.run_qkv_lora(x, site, out, info)
            case Kind.GATE_UP:
                self.run_gate_up_lora(x, site, out, info)
            case _:
                self.run_lora_b_sgemm(self.run_lora_a_sgemm(x, site, info), site, out, info)

    def run_qkv_lora(
        self, x: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Do A and B for q, k and v."""
        self.run_lora_b_sgemm(self.run_lora_a_sgemm(x, site, info), site, out, info)

    def run_gate_up_lora(
        self, x: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Do A and B for gate and up."""
        self.run_lora_b_sgemm(self.run_lora_a_sgemm(x, site, info), site, out, info)
