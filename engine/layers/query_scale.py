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
    rounds: bool = True  # the factor to the dtype of the queries, before it multiplies them

    def table(self, max_model_len: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the factor of every position, [max_model_len, 1] on the CPU.

        It is computed in float32 and, if it ``rounds``, rounded to the dtype of the queries.
        """
        positions = torch.arange(self.shift, self.shift + max_model_len)
        steps = torch.floor(positions / self.period)
        factors = (1 + self.beta * torch.log(1 + steps)).unsqueeze(1)
        return factors.to(dtype) if self.rounds else factors


@dataclass(frozen=True, slots=True)
class QueryScale:
    """``table`` [num_rows, 1]: see QueryScaling.

    Positions are rows of rotary tables, so it has as many: see Rotary.
    """

    table: torch.Tensor

    def __call__(self, positions: torch.Tensor, query: torch.Tensor) -> None:
        """Scale query [num_tokens, num_heads * head_dim] in place, before or after its rotation."""
        query *= self.table[positions]
