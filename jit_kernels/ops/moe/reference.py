"""References of the MoE kernels, in torch. They never synchronise with the device."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results

_LARGEST = torch.finfo(torch.float32).max


def route_reference(a: Arguments) -> Results:
    """Return weights and ids; shapes and rules as in route_tokens."""
    scores, choice = scores_and_choice(a)
    outside = torch.zeros_like(choice, dtype=torch.bool)
    if a.num_groups > 1:
        outside = outside_groups(group_ranks(choice, a), a)
    by_choice = torch.sort(choice, dim=1, descending=True, stable=True).indices
    inside_first = torch.sort(outside.gather(1, by_choice).int(), dim=1, stable=True).indices
    ids = by_choice.gather(1, inside_first)[:, : a.ids.shape[1]].to(torch.int32)
    return {"weights": weights_of(scores, a._replace(ids=ids)).to(a.weights.dtype), "ids": ids}


def scores_and_choice(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores for the weights and those for the choice, [tokens, experts] each."""
    wide = a.logits if a.logits.dtype == torch.float64 else a.logits.float()
    x = torch.where(wide.isnan(), -torch.inf, wide).clamp(max=_LARGEST)
    if a.sigmoid:
        scores = torch.sigmoid(x)
    else:
        parts = torch.where(x == -torch.inf, 0.0, torch.exp(x - x.amax(1, keepdim=True)))
        total = parts.sum(1, keepdim=True)
        scores = torch.where(total > 0, parts / total, 0.0)
    if a.bias is None and a.num_groups == 1:
        return scores, x  # x has the order of the scores, without their rounding
    choice = scores if a.bias is None else scores + a.bias
    return scores, torch.where(choice.isnan(), -torch.inf, choice)


def group_ranks(choice: torch.Tensor, a: Arguments) -> torch.Tensor:
    """Return what ranks each group, [tokens, num_groups]: its two largest choices, or the first."""
    grouped = choice.unflatten(1, (a.num_groups, -1))
    ranks = grouped.topk(1 if a.by_largest else 2, dim=2).values.sum(2)
    return torch.where(ranks.isnan(), -torch.inf, ranks)


def outside_groups(ranks: torch.Tensor, a: Arguments) -> torch.Tensor:
    """Return a mask of the experts outside the groups with the largest ranks, [tokens, experts]."""
    best = torch.sort(ranks, dim=1, descending=True, stable=True).indices[:, : a.top_groups]
    dropped = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, best, False)
    return dropped.repeat_interleave(a.logits.shape[1] // a.num_groups, dim=1)


def weights_of(scores: torch.Tensor, a: Arguments) -> torch.Tensor:
    """Return the weights of the experts ``a.ids``."""
    chosen = scores.gather(1, a.ids.long())
    if a.renormalise:
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20).clamp(min=a.least_sum)
    return chosen.mul(a.factor)


def align_capacity(pairs: int, num_experts: int, block_size: int) -> int:
    """Return the maximum number of places for so many pairs, a multiple of block_size."""
    used = min(pairs, num_experts)  # each expert with pairs adds at most block_size - 1
    whole = pairs + used * (block_size - 1)
    return -(-whole // block_size) * block_size


def align_reference(a: Arguments) -> Results:
    """Return the same as align_tokens."""
    flat, experts = a.ids.flatten().long(), a.expert_ends.shape[0]
    pairs, capacity = flat.numel(), a.sorted_token_ids.numel()
    bin_of = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=a.ids.device)
    counts.scatter_add_(0, bin_of, torch.ones_like(flat))
    counts = counts[:experts]
    padded = (counts + a.block_size - 1) // a.block_size * a.block_size
    ends = padded.cumsum(0)
    order = torch.sort(bin_of, stable=True).indices
    begins = torch.cat((ends - padded, ends.new_full((1,), capacity)))
    before = torch.cat((counts.cumsum(0) - counts, counts.sum().reshape(1)))
    bins = bin_of[order]
    rank = torch.arange(pairs, device=a.ids.device) - before[bins]
    places = torch.where(bins < experts, begins[bins] + rank, capacity)
    sorted_ids = torch.full((capacity + 1,), pairs, dtype=torch.int32, device=a.ids.device)
    sorted_ids.scatter_(0, places, torch.where(bins < experts, order, pairs).int())
    first = torch.arange(a.expert_ids.numel(), device=a.ids.device) * a.block_size
    owner = torch.searchsorted(ends, first, right=True)
    return {
        "sorted_token_ids": sorted_ids[:capacity],
        "expert_ids": torch.where(first < ends[-1], owner, -1).int(),
        "num_tokens_post_padded": ends[-1:].int(),
        "expert_ends": ends.int(),
    }
