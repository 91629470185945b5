"""The error of a routing against the float64 reference; float32 may choose another expert."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.moe.reference import (
    group_ranks,
    outside_groups,
    scores_and_choice,
    weights_of,
)

# The float32 error of a score or of a sum of two: float32 cannot order choices closer than this.
_INDISTINCT = 2e-6


def route_error(a: Arguments, wanted: Results) -> float:
    """Return the largest error of the chosen ids' weights.

    Infinite if ids are not distinct, out of range, or not those of the float64 reference. If
    float32 cannot order all choices of a row, an id may differ if its choice is as good.
    """
    experts = a.logits.shape[1]
    if not a.ids.numel():
        return 0.0
    ordered = torch.sort(a.ids.long(), dim=1).values
    if ordered[:, 0].min() < 0 or ordered[:, -1].max() >= experts:
        return float("inf")
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return float("inf")
    scores, choice = scores_and_choice(wide(a))
    wrong = (a.ids != wanted["ids"]).any(1)
    if (wrong & decidable_rows(choice, a)).any():
        return float("inf")
    if a.num_groups == 1:
        got, want = (choice.gather(1, ids.long()) for ids in (a.ids, wanted["ids"]))
        if not torch.where(got == want, 0.0, (got - want).abs()).le(2 * _INDISTINCT).all():
            return float("inf")
    want = weights_of(scores, a)
    return float(((a.weights.double() - want).abs() / want.abs().clamp(min=1)).max())


def wide(a: Arguments) -> Arguments:
    """Return the arguments with logits and bias in float64."""
    return a._replace(logits=a.logits.double(), bias=None if a.bias is None else a.bias.double())


def decidable_rows(choice: torch.Tensor, a: Arguments) -> torch.Tensor:
    """Return a mask [tokens] of the rows of a float64 choice that float32 orders in the same way.

    In these rows neighbours in the order are far apart or equal. Equal inputs are equal in any
    precision, and then the lower id is first.
    """
    decidable = torch.ones(choice.shape[0], dtype=torch.bool, device=choice.device)
    if a.num_groups > 1:
        ranks = group_ranks(choice, a)
        decidable &= _distinct(ranks, a.top_groups)
        choice = choice.masked_fill(outside_groups(ranks, a), -torch.inf)
    return decidable & _distinct(choice, a.ids.shape[1])


def _distinct(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return a mask of rows whose ``count`` + 1 largest values are far apart or equal."""
    head = torch.sort(x, dim=1, descending=True).values[:, : count + 1]
    gaps = head[:, :-1] - head[:, 1:]
    equal = head[:, :-1] == head[:, 1:]
    return (equal | (gaps > _INDISTINCT)).all(1)
