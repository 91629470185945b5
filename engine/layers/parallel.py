"""Layers of which each rank holds a part.

    column-parallel      a rank has some outputs        no sum
    row-parallel         a rank has some inputs         partial sums, a bias on rank 0 alone
    vocabulary-parallel  a rank has some tokens         embedding: partial sums; head: gathered

A Linear is column- or row-parallel by the weights that it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kiln.engine.distributed.group import group_named
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.opaque import opaque_operator
from kiln.engine.layers.partial_sum import PartialSum


def _gather(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the columns of all ranks, [rows, size * columns]; x: [rows, columns]."""
    ranks = group_named(group)
    together = ranks.all_gather(x.contiguous()).view(ranks.size, *x.shape)
    return together.transpose(0, 1).reshape(x.shape[0], -1)


opaque_operator("gather_columns(Tensor x, str group) -> Tensor", _gather, fake=None)


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A layer that ends in a row-parallel projection, so that it returns a partial sum."""

    layer: Callable[..., torch.Tensor]
    group: str

    def __call__(self, *inputs: torch.Tensor) -> PartialSum:
        """Return the rank's summand of what the whole layer returns."""
        return PartialSum(self.layer(*inputs), self.group)


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    """The embedding of a rank's tokens, zeros for others: a partial sum.

    ``places`` [vocab_size] int64 is a token's row in ``part``, whose last row is zero and stands
    for the tokens of other ranks.
    """

    places: torch.Tensor
    part: Embedding
    group: str

    @property
    def weight(self) -> torch.Tensor:
        """The rows of the rank's tokens, padding included, [room, hidden_size]."""
        return self.part.weight[:-1]

    def __call__(self, token_ids: torch.Tensor) -> PartialSum:
        """Map token_ids [num_tokens] to [num_tokens, hidden_size]."""
        return PartialSum(self.part(self.places[token_ids]), self.group)


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
