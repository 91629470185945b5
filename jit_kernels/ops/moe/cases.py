"""The cases on which the MoE kernels are tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.moe.reference import align_capacity


def _route_case(
    tokens: int, spare: int, top_k: int, groups: tuple[int, int] = (1, 1), **flags: int
) -> Sizes:
    """Return a case with ``spare`` experts fewer than the variant's maximum."""
    default = {"sigmoid": 0, "bias": 0, "renorm": 1, "hostile": 0}
    counts = {"tokens": tokens, "spare": spare, "top_k": top_k}
    return counts | {"groups": groups[0], "top_groups": groups[1]} | default | flags


ROUTE_SIZES = [
    _route_case(0, 0, 2),
    _route_case(9, 0, 8, (8, 4), sigmoid=1, bias=1, hostile=1),
    _route_case(10, 3, 2, hostile=1, renorm=0),
    _route_case(9, 0, 6, (4, 2), hostile=1),
    _route_case(9, 1, 32, sigmoid=1, hostile=1),
    _route_case(8, 120, 8, bias=1, renorm=0, hostile=1),
    _route_case(5, 64, 1, (32, 1), sigmoid=1, renorm=0),
    _route_case(9, 64, 8, (32, 4), sigmoid=1, bias=1),
    _route_case(9, 0, 6, (8, 3), by_largest=1, hostile=1, renorm=0),
    _route_case(9, 224, 4, (32, 6), by_largest=1, bias=1, clamped=1),
]
ROUTE_BENCH_SIZES = [
    _route_case(tokens, 0, 8, (8, 4), sigmoid=1, bias=1) for tokens in (1, 16, 64, 512, 8192)
] + [_route_case(tokens, 0, 8) for tokens in (1, 64, 8192)]
ALIGN_SIZES: list[Sizes] = [
    {"tokens": t, "top_k": k, "experts": e, "block_size": b, "skew": skew, "holes": holes}
    for t, k, e, b, skew, holes in [
        (0, 2, 8, 16, 0, 0),
        (1, 1, 1, 1, 0, 0),
        (5, 8, 256, 16, 0, 0),
        (67, 2, 8, 16, 9, 0),
        (64, 8, 512, 1, 0, 1),
        (260, 9, 60, 13, 0, 1),
        (40, 1, 3, 64, 10, 0),
    ]
]
ALIGN_BENCH_SIZES: list[Sizes] = [
    {"tokens": t, "top_k": 8, "experts": 256, "block_size": 64, "skew": 0, "holes": 0}
    for t in (1, 16, 128, 1024, 8192)
]


def route_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random logits; if "hostile", the first rows hold NaNs, infinities and ties."""
    tokens, top_k = sizes["tokens"], sizes["top_k"]
    experts = int(variant["max_experts"]) - sizes["spare"]
    x = torch.randn(tokens, experts + sizes["spare"] % 8, device=device).mul_(2)
    x = x.to(DTYPES[variant["router_t"]])[:, :experts]
    if sizes["hostile"]:
        inf, nan = float("inf"), float("nan")
        x[0] = nan
        x[1] = -inf
        x[2, ::2], x[2, 1::2] = 0.0, -0.0  # equal: the lower ids win
        x[3, 1::3] = nan
        x[4, -1] = inf
        x[5, experts // 2 :] = -inf
        x[6] = x[6, 0]
        x[7, 1:] = nan
    size = experts // sizes["groups"]
    if sizes["groups"] > 1 and size > 32 and tokens > 8:  # group 0 wins by two experts of a lane
        x[8] = -8.0
        x[8, ::size] = 3.5
        x[8, 0] = x[8, 32] = 3.0
    return {
        "weights": torch.empty(tokens, top_k, device=device),
        "ids": torch.empty(tokens, top_k, dtype=torch.int32, device=device),
        "logits": x,
        "bias": torch.randn(experts, device=device).mul_(0.3) if sizes["bias"] else None,
        "num_groups": sizes["groups"],
        "top_groups": sizes["top_groups"],
        "by_largest": bool(sizes.get("by_largest")),
        "sigmoid": bool(sizes["sigmoid"]),
        "renormalise": bool(sizes["renorm"]),
        "least_sum": 0.5 if sizes.get("clamped") else 0.0,  # more than some rows' sums
        "factor": 2.5 if sizes["sigmoid"] else 1.0,
    }


def align_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return distinct random experts per token; if "holes", some are out of range."""
    tokens, top_k, experts = sizes["tokens"], sizes["top_k"], sizes["experts"]
    block_size = sizes["block_size"]
    scores = torch.rand(tokens, experts, device=device)
    scores[:, experts // 2 :] *= 1 - sizes["skew"] / 10  # fewer tokens for the second half
    ids = scores.topk(top_k, dim=1).indices.int()
    if sizes["holes"]:
        ids.view(-1)[::5] = -1
        ids.view(-1)[1::7] = experts
    capacity = align_capacity(ids.numel(), experts, block_size)
    return {
        "sorted_token_ids": ids.new_empty(capacity),
        "expert_ids": ids.new_empty(capacity // block_size),
        "num_tokens_post_padded": ids.new_empty(1),
        "expert_ends": ids.new_empty(experts),
        "ids": ids,
        "block_size": block_size,
    }
