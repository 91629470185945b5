"""Layers of which each rank holds a part.

    column-parallel      a rank has some outputs        no sum
    row-parallel         a rank has some inputs         partial sums, a bias on rank 0 alone
    vocabulary-parallel  a rank has some tokens         embedding: partial sums; head: gathered

A Linear is column- or row-parallel by the weights that it gets. Every partial sum ends in a norm
on the residual stream, which adds up all ranks' first: one operator, so that sum, residual and norm
can be one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.distributed.group import group_named
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.opaque import opaque_operator


def _sum_and_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: str
) -> None:
    """Sum x over the ranks, add it to the residual, and leave the norm in x, all in place."""
    ranks = group_named(group)
    if ranks.all_reduce_add_rms_norm(x, residual, weight, eps):
        return
    ranks.all_reduce(x)
    torch.ops.kiln.fused_add_rms_norm.default(x, residual, weight, eps, 0.0)


def _gather(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the columns of all ranks, [rows, size * columns]; x: [rows, columns]."""
    ranks = group_named(group)
    together = ranks.all_gather(x.contiguous()).view(ranks.size, *x.shape)
    return together.transpose(0, 1).reshape(x.shape[0], -1)


opaque_operator(
    "sum_and_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, str group)"
    " -> ()",
    _sum_and_add,
)
opaque_operator("gather_columns(Tensor x, str group) -> Tensor", _gather, fake=None)


@dataclass(frozen=True, slots=True)
class SummingRMSNorm(RMSNorm):
    """An RMSNorm on the residual stream that first sums x over the ranks of ``group``."""

    group: str

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the sum of all ranks' x to the residual and leave the norm in x, both in place."""
        torch.ops.kiln.sum_and_add_rms_norm.default(x, residual, self.weight, self.eps, self.group)


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    """The embedding of a rank's tokens, zeros for others: a partial sum.

    ``places`` [vocab_size] int64 is a token's row in ``part``, whose last row is zero and stands
    for the tokens of other ranks.
    """

    places: torch.Tensor
    part: Embedding

    @property
    def weight(self) -> torch.Tensor:
        """The rows of the rank's tokens, padding included, [room, hidden_size]."""
        return self.part.weight[:-1]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token_ids [num_tokens] to [num_tokens, hidden_size]."""
        return self.part(self.places[token_ids])


@dataclass(frozen=True, slots=True)
class VocabParallelHead:
    """The LM head of a rank's tokens, and the logits of all."""

    part: Linear
    vocab_size: int
    group: str

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        logits: torch.Tensor = torch.ops.kiln.gather_columns.default(self.part(hidden), self.group)
        return logits[:, : self.vocab_size]
