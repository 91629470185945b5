"""The interface of what computes the adapters' parts of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from kiln.engine.lora.batch_info import LoRABatchInfo, make_batch_info
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Kind, Site

Layer = Callable[[], None]  # runs a layer without adapters


class BaseLoRABackend(ABC):
    """Adds scale * B A x to the outputs of layers, by segment of a step.

    Each segment uses the ranks and scales of its adapter slot, which differ by part: q, k and v
    have their own. A part of rank 0 adds nothing. ``name`` is what ``kernels`` reports.

    ``h``, between A and B, is [num_tokens, width], where width is at least the sum of the ranks of
    a site's parts; the columns of the parts follow each other without gaps. Tokens without an
    adapter may hold anything.
    """

    name: str

    def __init__(self, pool: AdapterPool) -> None:
        self.pool = pool

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
        self, base: Layer, x: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
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
