"""Partial sums: what one rank adds to a sum over all ranks.

A layer whose last projection is shared out by inputs returns one, and so does an embedding of some
of the tokens. A plain tensor is whole. Partial sums can be added and scaled like tensors; a norm
needs the total first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import kiln.jit_kernels.ops.norm.spec  # noqa: F401 (registers the operators)
from kiln.engine.distributed.group import group_named
from kiln.engine.layers.opaque import opaque_operator


class PartialSum(NamedTuple):
    """A rank's summand [num_tokens, hidden_size], and the name of the group that sums up."""

    values: torch.Tensor
    group: str


Sum = torch.Tensor | PartialSum  # whole, or still to be summed over ranks


def _sum_over_ranks(x: torch.Tensor, group: str) -> None:
    group_named(group).all_reduce(x)


def _sum_and_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    round_once: bool,
    group: str,
) -> None:
    """Sum x over the ranks, add it to the residual, and leave the norm in x, all in place."""
    ranks, factors = group_named(group), (weight, eps, weight_offset, round_once)
    if ranks.all_reduce_add_rms_norm(x, residual, *factors):
        return
    ranks.all_reduce(x)
    torch.ops.kiln.fused_add_rms_norm.default(x, residual, *factors)


opaque_operator(
    "sum_and_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, "
    "float weight_offset, bool round_once, str group) -> ()",
    _sum_and_add,
)
_sum_in_place = opaque_operator("sum_over_ranks(Tensor(a!) x, str group) -> ()", _sum_over_ranks)


def total(x: Sum) -> torch.Tensor:
    """Return the sum over ranks; overwrites a partial sum."""
    if isinstance(x, PartialSum):
        _sum_in_place(x.values, x.group)
        return x.values
    return x


def scaled(x: Sum, factor: float) -> Sum:
    """Return x times a number; x itself if that is 1."""
    if factor == 1.0:
        return x
    if isinstance(x, PartialSum):
        return PartialSum(x.values * factor, x.group)
    return x * factor


def plus(x: Sum, y: Sum) -> Sum:
    """Return x + y, of which both are partial sums or neither."""
    if isinstance(x, PartialSum) and isinstance(y, PartialSum):
        return PartialSum(x.values + y.values, x.group)
    if isinstance(x, PartialSum) or isinstance(y, PartialSum):
        raise TypeError("one of two summands is a partial sum: take the total of both first")
    return x + y


def values_of(x: Sum) -> torch.Tensor:
    """Return the values of x, of a partial sum those of this rank alone."""
    return x.values if isinstance(x, PartialSum) else x
