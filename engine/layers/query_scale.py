"""Queries that grow with their position, so that attention stays sharp over long contexts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """1 + ``beta`` * ln(1 + floor((position + ``shift``) / ``period``)), the factor of a query."""

    beta: float
    period: int
    shift: int = 0

    def table(self, max_model_len: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the factor of every position, [max_model_len, 1] on the CPU.

        It is computed in float32 and rounded to the dtype of the queries, as in transformers.
        """
        positions = torch.arange(self.shift, self.shift + max_model_len)
        steps = torch.floor(positions / self.period)
        return (1 + self.beta * torch.log(1 + steps)).to(dtype).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """``table`` [num_rows, 1] in the dtype of the queries: see QueryScaling.

    Positions are rows of rotary tables, so it has as many: see Rotary.
    """

    table: torch.Tensor

    def __call__(self, positions: torch.Tensor, query: torch.Tensor) -> None:
        """Scale query [num_tokens, num_heads * head_dim] in place, before or after its rotation."""
        query *= self.table[positions]
