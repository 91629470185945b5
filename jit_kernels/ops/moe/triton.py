"""Triton forms of the MoE kernels.

Routing is one launch, as in CUDA. Aligning takes three, with one program per expert that reads all
ids: a Triton program cannot keep a table in shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments

_CHUNK = 512


@triton.jit
def _route(  # noqa: PLR0913
    weights, ids, logits, bias, logits_stride, experts, num_groups, top_groups, least_sum,
    factor, TOP_K: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BY_LARGEST: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, BLOCK)
    valid = every < experts
    lowest = float("-inf")
    x = tl.load(logits + token * logits_stride + every, mask=valid, other=lowest).to(tl.float32)
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
        choice = score + tl.load(bias + every, mask=valid, other=0.0)
        choice = tl.where(choice == choice, choice, lowest)
    elif GROUPS > 1:
        choice = score
    left = valid
    if GROUPS > 1:
        size = experts // num_groups
        groups = tl.arange(0, GROUPS)
        ranks = tl.full((GROUPS,), lowest, tl.float32)
        for g in range(num_groups):
            mine = tl.where(every // size == g, choice, lowest)
            rank = tl.max(mine, 0)
            if not BY_LARGEST:
                at = tl.min(tl.where((every // size == g) & (mine == rank), every, BLOCK), 0)
                rank = rank + tl.max(tl.where(every == at, lowest, mine), 0)
            ranks = tl.where(groups == g, tl.where(rank == rank, rank, lowest), ranks)
        waiting = groups < num_groups
        left = every < 0
        for _ in range(top_groups):
            best = tl.max(tl.where(waiting, ranks, lowest), 0)
            g = tl.min(tl.where(waiting & (ranks == best), groups, GROUPS), 0)
            waiting = waiting & (groups != g)
            left = left | (valid & (every // size == g))
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    weight = tl.zeros((SLOTS,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(tl.where(left, choice, lowest), 0)
        expert = tl.min(tl.where(left & (choice == best), every, BLOCK), 0)
        left = left & (every != expert)
        chosen = tl.where(slots == j, expert, chosen)
        weight = tl.where(slots == j, tl.sum(tl.where(every == expert, score, 0.0), 0), weight)
    if RENORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, 0) + 1e-20, least_sum)
    out = token * TOP_K + slots
    tl.store(ids + out, chosen, mask=slots < TOP_K)
    tl.store(weights + out, weight * factor, mask=slots < TOP_K)


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
    expert_ends, num_tokens_post_padded, counts, experts, block_size, BLOCK: tl.constexpr
):  # fmt: skip
    expert = tl.arange(0, BLOCK)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    padded = (count + block_size - 1) // block_size * block_size
    tl.store(expert_ends + expert, tl.cumsum(padded, 0), mask=expert < experts)
    tl.store(num_tokens_post_padded, tl.sum(padded, 0))


@triton.jit
def _scatter(
    sorted_token_ids, expert_ids, expert_ends, ids, pairs, block_size, CHUNK: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    begin = tl.load(expert_ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(expert_ends + expert)
    filled = begin
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        mine = tl.load(ids + at, mask=at < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_token_ids + filled + rank, at, mask=mine)
        filled += tl.sum(mine.to(tl.int32), 0)
    for first in range(begin // block_size, end // block_size, CHUNK):
        block = first + tl.arange(0, CHUNK)
        tl.store(expert_ids + block, expert, mask=block < end // block_size)


def route_tokens(a: Arguments) -> None:
    """Write each token's experts and their weights."""
    tokens, experts = a.logits.shape
    if not tokens:
        return
    top_k, biased = a.ids.shape[1], a.bias is not None
    _route[(tokens,)](
        a.weights, a.ids, a.logits, a.bias if biased else a.logits, a.logits.stride(0), experts,
        a.num_groups, a.top_groups, a.least_sum, a.factor, top_k, triton.next_power_of_2(experts),
        triton.next_power_of_2(a.num_groups), biased, a.by_largest, a.sigmoid, a.renormalise,
        triton.next_power_of_2(top_k),
    )  # fmt: skip


def align_tokens(a: Arguments) -> None:
    """Sort pairs by expert into padded runs."""
    ends, experts, pairs = a.expert_ends, a.expert_ends.numel(), a.ids.numel()
    counts = torch.empty_like(ends)
    a.sorted_token_ids.fill_(pairs)
    a.expert_ids.fill_(-1)
    _count[(experts,)](counts, a.ids, pairs, _CHUNK)
    block = triton.next_power_of_2(experts)
    _lay_out[(1,)](ends, a.num_tokens_post_padded, counts, experts, a.block_size, block)
    _scatter[(experts,)](a.sorted_token_ids, a.expert_ids, ends, a.ids, pairs, a.block_size, _CHUNK)
