"""Triton forms of the MoE kernels: same arguments as the operators, written in place.

Routing is one launch, as Kiln's own. Aligning takes three, and a program for each expert that reads
all ids: a Triton program cannot keep a table of its own in shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 512


@triton.jit
def _route(  # noqa: PLR0913
    out_weights, out_ids, logits, bias, stride, experts, num_groups, top_groups, factor,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    there = ids < experts
    lowest = float("-inf")
    x = tl.load(logits + token * stride + ids, mask=there, other=lowest).to(tl.float32)
    x = tl.where(x == x, tl.minimum(x, 3.4028234663852886e38), lowest)
    if SIGMOID:
        e = tl.exp(-tl.abs(x))
        score = tl.where(x == lowest, 0.0, tl.where(x < 0, e, 1.0) / (1.0 + e))
    else:
        part = tl.where(x == lowest, 0.0, tl.exp(x - tl.max(x, 0)))
        total = tl.sum(part, 0)
        score = tl.where(total > 0, part / tl.where(total > 0, total, 1.0), 0.0)
    choice = x
    if HAS_BIAS:
        choice = score + tl.load(bias + ids, mask=there, other=0.0)
        choice = tl.where(choice == choice, choice, lowest)
    elif GROUPS > 1:
        choice = score
    left = there
    if GROUPS > 1:
        size = experts // num_groups
        groups = tl.arange(0, GROUPS)
        sums = tl.full((GROUPS,), lowest, tl.float32)
        for g in range(num_groups):
            mine = tl.where(ids // size == g, choice, lowest)
            first = tl.max(mine, 0)
            at = tl.min(tl.where((ids // size == g) & (mine == first), ids, BLOCK), 0)
            two = first + tl.max(tl.where(ids == at, lowest, mine), 0)
            sums = tl.where(groups == g, tl.where(two == two, two, lowest), sums)
        waiting = groups < num_groups
        left = ids < 0
        for _ in range(top_groups):
            best = tl.max(tl.where(waiting, sums, lowest), 0)
            g = tl.min(tl.where(waiting & (sums == best), groups, GROUPS), 0)
            waiting = waiting & (groups != g)
            left = left | (there & (ids // size == g))
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    weight = tl.zeros((SLOTS,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(tl.where(left, choice, lowest), 0)
        expert = tl.min(tl.where(left & (choice == best), ids, BLOCK), 0)
        left = left & (ids != expert)
        chosen = tl.where(slots == j, expert, chosen)
        weight = tl.where(slots == j, tl.sum(tl.where(ids == expert, score, 0.0), 0), weight)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    out = token * TOP_K + slots
    tl.store(out_ids + out, chosen, mask=slots < TOP_K)
    tl.store(out_weights + out, weight * factor, mask=slots < TOP_K)


@triton.jit
def _count(counts, ids, pairs, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    count = 0
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        one = tl.load(ids + at, mask=at < pairs, other=-1)
        count += tl.sum((one == expert).to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit
def _lay_out(
    ends, num_post_padded, counts, experts, block_size, BLOCK: tl.constexpr
):  # fmt: skip
    expert = tl.arange(0, BLOCK)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    padded = (count + block_size - 1) // block_size * block_size
    tl.store(ends + expert, tl.cumsum(padded, 0), mask=expert < experts)
    tl.store(num_post_padded, tl.sum(padded, 0))


@triton.jit
def _scatter(
    sorted_ids, expert_ids, ends, ids, pairs, block_size, CHUNK: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    filled = begin
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        mine = tl.load(ids + at, mask=at < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_ids + filled + rank, at, mask=mine)
        filled += tl.sum(mine.to(tl.int32), 0)
    for first in range(begin // block_size, end // block_size, CHUNK):
        block = first + tl.arange(0, CHUNK)
        tl.store(expert_ids + block, expert, mask=block < end // block_size)


def route_tokens(  # noqa: PLR0913 (the operator's arguments)
    out_weights: torch.Tensor,
    out_ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    sigmoid: bool,
    renormalise: bool,
    factor: float,
) -> None:
    """Write each token's experts and their weights; shapes as the operator's."""
    tokens, experts = logits.shape
    if not tokens:
        return
    top_k = out_ids.shape[1]
    _route[(tokens,)](
        out_weights, out_ids, logits, logits if bias is None else bias, logits.stride(0), experts,
        num_groups, top_groups, factor, top_k, triton.next_power_of_2(experts),
        triton.next_power_of_2(num_groups), bias is not None, sigmoid, renormalise,
        triton.next_power_of_2(top_k),
    )  # fmt: skip


def align_tokens(
    out_sorted_token_ids: torch.Tensor,
    out_expert_ids: torch.Tensor,
    out_num_tokens_post_padded: torch.Tensor,
    out_expert_ends: torch.Tensor,
    ids: torch.Tensor,
    block_size: int,
) -> None:
    """Sort pairs by expert into padded runs; shapes as the operator's."""
    experts, pairs = out_expert_ends.numel(), ids.numel()
    counts = torch.empty_like(out_expert_ends)
    out_sorted_token_ids.fill_(pairs)
    out_expert_ids.fill_(-1)
    _count[(experts,)](counts, ids, pairs, _CHUNK)
    block = triton.next_power_of_2(experts)
    _lay_out[(1,)](out_expert_ends, out_num_tokens_post_padded, counts, experts, block_size, block)
    _scatter[(experts,)](
        out_sorted_token_ids, out_expert_ids, out_expert_ends, ids, pairs, block_size, _CHUNK
    )
