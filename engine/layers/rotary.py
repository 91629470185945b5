"""Rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kiln.jit_kernels.ops.rotary.spec  # noqa: F401 (registers the operator)


@dataclass(frozen=True, slots=True)
class Rotary:
    """``table`` [num_rows, rotary_dim] float32: cosines then sines of every position.

    A model with other frequencies for long requests has two tables in one, see ``rotary_table``;
    what it gets as the position of a token is the row of the table.
    """

    table: torch.Tensor

    def __call__(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """Rotate query and key [num_tokens, heads, head_dim] in place by their positions."""
        torch.ops.kiln.apply_rotary.default(positions, query, key, self.table)
