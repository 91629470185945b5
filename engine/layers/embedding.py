"""Token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Embedding:
    """token_ids [num_tokens] -> [num_tokens, hidden_size]. ``weight`` is [vocab, hidden_size]."""

    weight: torch.Tensor

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with one row of ``weight`` per token."""
        return F.embedding(token_ids, self.weight)
