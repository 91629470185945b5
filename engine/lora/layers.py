"""Projections and embeddings that add what the adapters of a step's requests change."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.lora.operators import lora_embedding, lora_linear


@dataclass(frozen=True, slots=True)
class LoRALinear(Linear):
    """A Linear plus scale * B A x for the tokens of each adapter; ``rows`` as in Site."""

    rows: torch.Tensor = field(kw_only=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, in] to [num_tokens, out]."""
        out = x.new_empty(len(x), len(self.weight))
        lora_linear(x, self.weight, self.bias, self.rows, out)
        return out


@dataclass(frozen=True, slots=True)
class LoRAEmbedding(Embedding):
    """An Embedding plus scale * B A[:, token] for the tokens of each adapter."""

    rows: torch.Tensor = field(kw_only=True)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, hidden_size]."""
        out = Embedding.__call__(self, token_ids)
        lora_embedding(token_ids, out, self.rows)
        return out
