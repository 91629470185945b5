"""What the MoE kernels must compute, in torch: the test oracle and the CPU's form.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_LARGEST = torch.finfo(torch.float32).max
# What float32 may be off in a score or in a sum of two: below it, two choices cannot be told apart.
CANNOT_TELL = 2e-6


def route_reference(  # noqa: PLR0913 (the operator's arguments)
    out_weights: torch.Tensor,
    out_ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    sigmoid: bool,
    renormalise: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids; shapes and rules as in ops.moe.route_tokens."""
    scores, choice = scores_and_choice(logits, bias, num_groups, sigmoid)
    outside = torch.zeros_like(choice, dtype=torch.bool)
    if num_groups > 1:
        sums = group_sums(choice, num_groups)
        best = torch.sort(sums, dim=1, descending=True, stable=True).indices[:, :top_groups]
        left = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
        outside = left.repeat_interleave(choice.shape[1] // num_groups, dim=1)
    by_choice = torch.sort(choice, dim=1, descending=True, stable=True).indices
    inside_first = torch.sort(outside.gather(1, by_choice).int(), dim=1, stable=True).indices
    ids = by_choice.gather(1, inside_first)[:, : out_ids.shape[1]]
    weights = weights_of(scores, ids, renormalise, factor)
    return weights.to(out_weights.dtype), ids.to(torch.int32)


def scores_and_choice(
    logits: torch.Tensor, bias: torch.Tensor | None, num_groups: int, sigmoid: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what experts weigh and what they are chosen by, [tokens, experts] each."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    x = torch.where(wide.isnan(), -torch.inf, wide).clamp(max=_LARGEST)
    if sigmoid:
        scores = torch.sigmoid(x)
    else:
        parts = torch.where(x == -torch.inf, 0.0, torch.exp(x - x.amax(1, keepdim=True)))
        total = parts.sum(1, keepdim=True)
        scores = torch.where(total > 0, parts / total, 0.0)
    if bias is None and num_groups == 1:
        return scores, x  # of one order, and nothing is rounded
    choice = scores if bias is None else scores + bias
    return scores, torch.where(choice.isnan(), -torch.inf, choice)


def group_sums(choice: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return the sum of each group's two largest choices, [tokens, num_groups]."""
    grouped = choice.unflatten(1, (num_groups, -1))
    sums = grouped.topk(2, dim=2).values.sum(2)
    return torch.where(sums.isnan(), -torch.inf, sums)


def weights_of(
    scores: torch.Tensor, ids: torch.Tensor, renormalise: bool, factor: float
) -> torch.Tensor:
    """Return the weights of chosen experts."""
    chosen = scores.gather(1, ids.long())
    if renormalise:
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    return chosen * factor


def route_error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest error of the weights of the ids that were chosen.

    Infinite where ids are not distinct, not in range, or not those of the float64 reference: in
    rows where float32 can tell the choices apart all of them, else all but those it cannot tell.
    """
    weights, ids, logits, bias, num_groups, top_groups, sigmoid, renormalise, factor = arguments
    experts = logits.shape[1]
    if not ids.numel():
        return 0.0
    ordered = torch.sort(ids.long(), dim=1).values
    if ordered[:, 0].min() < 0 or ordered[:, -1].max() >= experts:
        return float("inf")
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return float("inf")
    wide_bias = None if bias is None else bias.double()
    scores, choice = scores_and_choice(logits.double(), wide_bias, num_groups, sigmoid)
    decidable = decidable_rows(choice, ids.shape[1], num_groups, top_groups)
    wrong = (ids != wanted[1]).any(1)
    if (wrong & decidable).any():
        return float("inf")
    if num_groups == 1:  # the others may differ by what cannot be told, and by no more
        got, want = (choice.gather(1, one.long()) for one in (ids, wanted[1]))
        if not torch.where(got == want, 0.0, (got - want).abs()).le(2 * CANNOT_TELL).all():
            return float("inf")
    want = weights_of(scores, ids, renormalise, factor)
    return float(((weights.double() - want).abs() / want.abs().clamp(min=1)).max())


def decidable_rows(
    choice: torch.Tensor, top_k: int, num_groups: int, top_groups: int
) -> torch.Tensor:
    """Return which rows of a float64 choice leave float32 no doubt, [tokens].

    Neighbours in the order are far apart, or equal: equal inputs are equal in any precision, and
    then the lower id comes first.
    """
    decidable = torch.ones(choice.shape[0], dtype=torch.bool, device=choice.device)
    if num_groups > 1:
        sums = group_sums(choice, num_groups)
        ordered = torch.sort(sums, dim=1, descending=True, stable=True)
        decidable &= _clear(ordered.values, top_groups)
        left = torch.ones_like(sums, dtype=torch.bool).scatter_(
            1, ordered.indices[:, :top_groups], False
        )
        outside = left.repeat_interleave(choice.shape[1] // num_groups, dim=1)
        choice = choice.masked_fill(outside, -torch.inf)
    return decidable & _clear(torch.sort(choice, dim=1, descending=True).values, top_k)


def _clear(descending: torch.Tensor, count: int) -> torch.Tensor:
    head = descending[:, : count + 1]
    gaps = head[:, :-1] - head[:, 1:]
    equal = head[:, :-1] == head[:, 1:]
    return (equal | (gaps > CANNOT_TELL)).all(1)


def align_reference(
    out_sorted_token_ids: torch.Tensor,
    out_expert_ids: torch.Tensor,
    out_num_tokens_post_padded: torch.Tensor,
    out_expert_ends: torch.Tensor,
    ids: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """Return sorted token ids, experts of blocks, padded length, experts' ends: as align_tokens."""
    flat, experts = ids.flatten().long(), out_expert_ends.shape[0]
    pairs, capacity = flat.numel(), out_sorted_token_ids.numel()
    bin_of = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, bin_of, torch.ones_like(flat))
    counts = counts[:experts]
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = torch.sort(bin_of, stable=True).indices
    begins = torch.cat((ends - padded, ends.new_full((1,), capacity)))
    before = torch.cat((counts.cumsum(0) - counts, counts.sum().reshape(1)))
    bins = bin_of[order]
    rank = torch.arange(pairs, device=ids.device) - before[bins]
    places = torch.where(bins < experts, begins[bins] + rank, capacity)
    sorted_ids = torch.full((capacity + 1,), pairs, dtype=torch.int32, device=ids.device)
    sorted_ids.scatter_(0, places, torch.where(bins < experts, order, pairs).int())
    first = torch.arange(out_expert_ids.numel(), device=ids.device) * block_size
    owner = torch.searchsorted(ends, first, right=True)
    blocks = torch.where(first < ends[-1], owner, -1)
    return sorted_ids[:capacity], blocks.int(), ends[-1:].int(), ends.int()
