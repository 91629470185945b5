"""Token embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kiln.engine.layers.partial_sum import Sum, scaled


@dataclass(frozen=True, slots=True)
class Embedding:
    """token_ids [num_tokens] -> [num_tokens, hidden_size]. ``weight`` is [vocab, hidden_size]."""

    weight: torch.Tensor

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with one row of ``weight`` per token."""
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """An embedding times a number."""

    part: Callable[[torch.Tensor], Sum]
    factor: float

    def __call__(self, token_ids: torch.Tensor) -> Sum:
        """Map token_ids [num_tokens] to [num_tokens, hidden_size]."""
        return scaled(self.part(token_ids), self.factor)
