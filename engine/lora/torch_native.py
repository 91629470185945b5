"""The adapters' parts in plain torch, segment by segment: the oracle of all other backends."""

from __future__ import annotations

import torch

from kiln.engine.lora.backend import BaseLoRABackend
from kiln.engine.lora.batch_info import LoRABatchInfo
from kiln.engine.lora.sites import Site


class TorchNativeLoRA(BaseLoRABackend):
    """Computes in float32, in float64 for a model of that dtype, and rounds once, at the sum."""

    name = "torch_native"

    def run_lora_a_sgemm(self, x: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        """Return h = A x of all parts of a projection; x: [num_tokens, input_size]."""
        h = self._empty(x, site, info)
        for slot, tokens in info.adapted():
            rank = sum(self.pool.site_ranks(site, slot))
            if rank:
                a = self.pool.stacked_a(site, slot).to(h.dtype)
                h[tokens, :rank] = x[tokens].to(h.dtype) @ a.T
        return h

    def run_lora_b_sgemm(
        self, h: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Add scale * B h of each part to its columns of out [num_tokens, output size]."""
        for slot, tokens in info.adapted():
            column = 0
            for part, rank in zip(site.parts, self.pool.site_ranks(site, slot), strict=True):
                if rank:
                    end = part.output_start + part.output_size
                    b = self.pool.b(part, slot).to(h.dtype)
                    scale = float(self.pool.scales[part.row, slot])
                    own = h[tokens, column : column + rank]
                    out[tokens, part.output_start : end] += own @ b * scale
                column += rank

    def run_lora_a_embedding(
        self, token_ids: torch.Tensor, site: Site, info: LoRABatchInfo
    ) -> torch.Tensor:
        """Return h, the columns of A for token_ids [num_tokens] int64."""
        h = self._empty(token_ids, site, info)
        for slot, tokens in info.adapted():
            (rank,) = self.pool.site_ranks(site, slot)
            if rank:
                h[tokens, :rank] = self.pool.embedding_a(site, slot)[token_ids[tokens]].to(h.dtype)
        return h

    def _empty(self, rows: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        assert len(rows) == info.num_tokens, "the segments are those of other rows"
        dtype = torch.promote_types(self.pool.values.dtype, torch.float32)
        ranks = [sum(self.pool.site_ranks(site, slot)) for slot, _ in info.adapted()]
        width = max(ranks, default=0)
        return torch.empty(len(rows), width, dtype=dtype, device=rows.device)
