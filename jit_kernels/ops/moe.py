"""Mixture of experts: which experts a token goes to, and the tokens in the order of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kiln.jit_kernels.ops.activation.functions import silu_and_mul
from kiln.jit_kernels.references.moe import align_reference, route_error, route_reference
from kiln.jit_kernels.shapes import check_shape, takes_arrays
from kiln.jit_kernels.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.torch_ops import call, define

MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 32, 32
_CAPACITIES = ("256", "512")  # experts that a program of route_tokens has registers for
# Routers compute in float32 or bf16, whatever the model's dtype; others are made float32.
_LOGITS = ("float", "kiln::bf16")
_WARPS = 4
_ALIGN_PAIRS, _MOST_ALIGN_BLOCKS = 2048, 16  # pairs of a block
_ALIGN_THREADS = 512


class Aligned(NamedTuple):
    """Token-expert pairs in the order of experts; all int32.

    ``sorted_token_ids`` [capacity] are places in ids.flatten(), or its length where a run is filled
    up; ``expert_ids`` [blocks] the expert of each block, -1 after the last;
    ``num_tokens_post_padded`` [1]; ``expert_ends`` [num_experts], where each expert's run ends.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    expert_ends: torch.Tensor


@takes_arrays
def route_tokens(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    renormalise: bool = True,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [num_tokens, top_k] float32 and expert ids [num_tokens, top_k] int32.

    logits: [num_tokens, num_experts]; bias: [num_experts] float32, added to the scores for the
    choice alone. ``scoring`` is "softmax" (Mixtral, Qwen) or "sigmoid" (DeepSeek-V3). ``groups`` =
    (n, kept): experts are n groups of neighbours, and only those in the groups whose two largest
    choices have the largest sums can be chosen. The largest comes first, of equal ones the lower
    id. Ids are distinct and in range whatever the logits hold: a NaN counts as -inf, and an expert
    at -inf weighs 0. ``renormalise`` divides the weights by their sum + 1e-20; ``factor``
    multiplies them. Raises ValueError on a wrong shape or number, TypeError on a wrong dtype.
    Source: https://arxiv.org/abs/2412.19437 section 2.1.2
    """
    num_groups, top_groups = groups
    if logits.dim() != 2 or logits.dtype not in SCALARS:
        raise TypeError(
            f"route_tokens: logits are {logits.dtype} {list(logits.shape)}; want two dimensions of "
            f"{', '.join(map(str, SCALARS))}"
        )
    tokens, experts = logits.shape
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"route_tokens: scoring {scoring!r}; want 'softmax' or 'sigmoid'")
    _check_counts(experts, top_k, num_groups, top_groups)
    if bias is not None:
        check_shape("route_tokens", "bias", bias, (experts,))
        if bias.dtype != torch.float32 or bias.device != logits.device:
            raise TypeError(
                f"route_tokens: bias is {bias.dtype} on {bias.device}; want torch.float32 on "
                f"{logits.device}"
            )
        bias = bias.contiguous()
    if not _ROUTE.has_variant(_variant(logits)):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int32)
    more = (num_groups, top_groups, scoring == "sigmoid", renormalise, factor)
    call(_ROUTE, weights, ids, logits, bias, *more)
    return weights, ids


def _check_counts(experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"route_tokens: {experts} experts; want 1 to {MAX_EXPERTS}")
    if not 1 <= num_groups <= MAX_GROUPS or experts % num_groups:
        raise ValueError(
            f"route_tokens: {num_groups} groups of {experts} experts; want a divisor, at most "
            f"{MAX_GROUPS}"
        )
    size = experts // num_groups
    if not 1 <= top_groups <= num_groups or (num_groups > 1 and size < 2):
        raise ValueError(
            f"route_tokens: keep {top_groups} of {num_groups} groups of {size}; want 1 to "
            f"{num_groups}, and groups of 2 or more"
        )
    if not 1 <= top_k <= min(MAX_TOP_K, top_groups * size):
        raise ValueError(
            f"route_tokens: top_k {top_k}; want 1 to {min(MAX_TOP_K, top_groups * size)}"
        )


@takes_arrays
def align_tokens(ids: torch.Tensor, num_experts: int, block_size: int) -> Aligned:
    """Return the token-expert pairs of ids sorted by expert, in runs of whole blocks.

    ids: [num_tokens, top_k] int32; a pair whose id is not in 0 .. num_experts-1 is left out, such
    as that of an expert on another GPU. The order of pairs inside an expert is that of the tokens,
    on every run. With a block_size of 1 nothing is padded, and ``expert_ends`` are the offsets
    that a grouped matrix product takes. Raises ValueError and TypeError.
    """
    if ids.dtype != torch.int32:
        raise TypeError(f"align_tokens: ids are {ids.dtype}; want torch.int32")
    if not 1 <= num_experts <= MAX_EXPERTS or block_size < 1:
        raise ValueError(
            f"align_tokens: {num_experts} experts, blocks of {block_size}; want 1 to "
            f"{MAX_EXPERTS}, and 1 or more"
        )
    pairs = ids.numel()
    capacity = align_capacity(pairs, num_experts, block_size)
    if capacity > 2**30:
        raise ValueError(f"align_tokens: {capacity} places in all; want at most {2**30}")
    sizes = (capacity, capacity // block_size, 1, num_experts)
    aligned = Aligned(*(ids.new_empty(size) for size in sizes))
    call(_ALIGN, *aligned, ids.contiguous(), block_size)
    return aligned


def expert_capacity(num_experts: int) -> str:
    """Return the ``max_experts`` of the program that routes to so many."""
    return next(text for text in _CAPACITIES if num_experts <= int(text))


def align_capacity(pairs: int, num_experts: int, block_size: int) -> int:
    """Return how many places pairs may need, whatever their experts: a multiple of block_size."""
    used = min(pairs, num_experts)  # each expert that is used wastes at most block_size - 1
    whole = pairs + used * (block_size - 1)
    return -(-whole // block_size) * block_size


def moe_experts(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the sum over chosen experts of weight * w2 @ silu_and_mul(w1 @ x), in x's dtype.

    x: [num_tokens, hidden]; w1: [num_experts, 2 * intermediate, hidden], gate first; w2:
    [num_experts, hidden, intermediate]; weights, ids: [num_tokens, top_k] as route_tokens gives
    them. A pair whose id is out of range adds nothing. The products are torch's grouped ones; the
    sum is float32, in the order of top_k. Raises ValueError on a wrong shape.
    """
    (tokens, hidden), experts, top_k = x.shape, w1.shape[0], ids.shape[1]
    check_shape("moe_experts", "w2", w2, (experts, hidden, w1.shape[1] // 2))
    check_shape("moe_experts", "weights", weights, ids.shape)
    check_shape("moe_experts", "ids", ids, (tokens, top_k))
    if not ids.numel():
        return torch.zeros_like(x)
    aligned = align_tokens(ids, experts, 1)
    places = aligned.sorted_token_ids.long()  # past the last end: ids.numel(), where none is
    inside = places < ids.numel()
    rows = x[places.clamp(max=ids.numel() - 1) // top_k]
    ends = aligned.expert_ends
    middle = silu_and_mul(F.grouped_mm(rows, w1.transpose(1, 2), offs=ends))
    parts = F.grouped_mm(middle, w2.transpose(1, 2), offs=ends)
    # What no group covers is undefined: it must not even be multiplied by 0.
    parts = torch.where(inside.unsqueeze(1), parts, 0.0).float()
    back = parts.new_zeros(ids.numel() + 1, hidden).index_copy_(0, places, parts)
    scaled = back[:-1].view(tokens, top_k, hidden) * weights.unsqueeze(2)
    return scaled.sum(1).to(x.dtype)


def _route_bind(  # noqa: PLR0913 (the operator's arguments)
    out_weights: torch.Tensor,
    out_ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    sigmoid: bool,
    renormalise: bool,
    factor: float,
) -> Bound:
    tokens, experts = logits.shape
    values = (
        *(out_weights, out_ids, logits, 0 if bias is None else bias, tokens, logits.stride(0)),
        *(experts, out_ids.shape[1], num_groups, top_groups, int(sigmoid), int(renormalise)),
        factor,
    )
    return Bound(_variant(logits), {"tokens": tokens}, values)


def _variant(logits: torch.Tensor) -> Variant:
    return {"logits_t": SCALARS[logits.dtype], "max_experts": expert_capacity(logits.shape[1])}


def _route_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    blocks = -(-sizes["tokens"] // _WARPS)
    return LaunchGeometry((min(blocks, 2**31 - 1), 1, 1), (32 * _WARPS, 1, 1))


def _route_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, experts = sizes["tokens"], int(variant["max_experts"]) - sizes["spare"]
    logits = tokens * experts * DTYPES[variant["logits_t"]].itemsize
    return Cost(
        logits + 4 * experts * sizes["bias"] + 8 * tokens * sizes["top_k"], 8 * tokens * experts
    )


def _route_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[object, ...]:
    tokens, top_k = sizes["tokens"], sizes["top_k"]
    experts = int(variant["max_experts"]) - sizes["spare"]
    x = torch.randn(tokens, experts + sizes["spare"] % 8, device=device).mul_(2)
    x = x.to(DTYPES[variant["logits_t"]])[:, :experts]
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
    if sizes["groups"] > 1 and size > 32 and tokens > 8:  # two experts of a lane save group 0
        x[8] = -8.0
        x[8, ::size] = 3.5
        x[8, 0] = x[8, 32] = 3.0
    bias = torch.randn(experts, device=device).mul_(0.3) if sizes["bias"] else None
    weights = torch.empty(tokens, top_k, device=device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    more = (sizes["groups"], sizes["top_groups"], bool(sizes["sigmoid"]), bool(sizes["renorm"]))
    return (weights, ids, x, bias, *more, 2.5 if sizes["sigmoid"] else 1.0)


def _route_case(
    tokens: int, spare: int, top_k: int, groups: tuple[int, int] = (1, 1), **flags: int
) -> Sizes:
    default = {"sigmoid": 0, "bias": 0, "renorm": 1, "hostile": 0}
    counts = {"tokens": tokens, "spare": spare, "top_k": top_k}
    return counts | {"groups": groups[0], "top_groups": groups[1]} | default | flags


_ROUTE = KernelSpec(
    name="route_tokens",
    source="moe/route_tokens.cu",
    entry="route_tokens",
    schema="(Tensor(a!) out_weights, Tensor(b!) out_ids, Tensor logits, Tensor? bias, "
    "int num_groups, int top_groups, bool sigmoid, bool renormalise, float factor) -> ()",
    arguments=("pointer",) * 4 + ("int64",) * 2 + ("int32",) * 6 + ("float",),
    params={"logits_t": _LOGITS, "max_experts": list(_CAPACITIES)},
    comes=lambda variant: dict(variant) != {"logits_t": "kiln::bf16", "max_experts": "512"},
    bind=_route_bind,
    geometry=_route_geometry,
    cost=_route_cost,
    reference=route_reference,
    make_inputs=_route_inputs,
    sizes=[
        _route_case(0, 0, 2),
        _route_case(9, 0, 8, (8, 4), sigmoid=1, bias=1, hostile=1),
        _route_case(10, 3, 2, hostile=1, renorm=0),
        _route_case(9, 0, 6, (4, 2), hostile=1),
        _route_case(9, 1, 32, sigmoid=1, hostile=1),
        _route_case(8, 120, 8, bias=1, renorm=0, hostile=1),
        _route_case(5, 64, 1, (32, 1), sigmoid=1, renorm=0),
        _route_case(9, 64, 8, (32, 4), sigmoid=1, bias=1),
    ],
    bench_sizes=[
        _route_case(tokens, 0, 8, (8, 4), sigmoid=1, bias=1) for tokens in (1, 16, 64, 512, 8192)
    ]
    + [_route_case(tokens, 0, 8) for tokens in (1, 64, 8192)],
    tolerance=1e-6,
    error=route_error,
    bench_needs={"logits_t": "float", "max_experts": "256"},
    max_cpu_seconds=0.4,
    paper="https://arxiv.org/abs/2412.19437",
)


def _align_bind(
    out_sorted_token_ids: torch.Tensor,
    out_expert_ids: torch.Tensor,
    out_num_tokens_post_padded: torch.Tensor,
    out_expert_ends: torch.Tensor,
    ids: torch.Tensor,
    block_size: int,
) -> Bound:
    outs = (out_sorted_token_ids, out_expert_ids, out_num_tokens_post_padded, out_expert_ends)
    counts = (ids.numel(), out_expert_ends.numel(), block_size)
    rooms = (out_sorted_token_ids.numel(), out_expert_ids.numel())
    tokens, top_k = ids.shape
    sizes = {"tokens": tokens, "top_k": top_k, "experts": out_expert_ends.numel()}
    return Bound({}, sizes, (*outs, ids, *counts, *rooms))


def _align_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return a block, and with many pairs more, which have different experts."""
    wanted = -(-sizes["tokens"] * sizes["top_k"] // _ALIGN_PAIRS)
    blocks = max(1, min(wanted, _MOST_ALIGN_BLOCKS, sizes["experts"]))
    return LaunchGeometry((blocks, 1, 1), (_ALIGN_THREADS, 1, 1))


def _align_cost(variant: Variant, sizes: Sizes) -> Cost:
    pairs, experts = sizes["tokens"] * sizes["top_k"], sizes["experts"]
    capacity = align_capacity(pairs, experts, sizes["block_size"])
    return Cost(4 * (pairs + capacity + capacity // sizes["block_size"] + 1 + experts), 0)


def _align_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[object, ...]:
    tokens, top_k, experts = sizes["tokens"], sizes["top_k"], sizes["experts"]
    scores = torch.rand(tokens, experts, device=device)
    scores[:, experts // 2 :] *= 1 - sizes["skew"] / 10  # fewer for the second half
    ids = scores.topk(top_k, dim=1).indices.int()
    if sizes["holes"]:
        ids.view(-1)[::5] = -1
        ids.view(-1)[1::7] = experts
    capacity = align_capacity(ids.numel(), experts, sizes["block_size"])
    rooms = (capacity, capacity // sizes["block_size"], 1, experts)
    return (*(ids.new_empty(room) for room in rooms), ids, sizes["block_size"])


_ALIGN = KernelSpec(
    name="align_tokens",
    source="moe/align_tokens.cu",
    entry="align_tokens",
    schema="(Tensor(a!) out_sorted_token_ids, Tensor(b!) out_expert_ids, "
    "Tensor(c!) out_num_tokens_post_padded, Tensor(d!) out_expert_ends, Tensor ids, "
    "int block_size) -> ()",
    arguments=("pointer",) * 5 + ("int32",) * 5,
    params={},
    bind=_align_bind,
    geometry=_align_geometry,
    cost=_align_cost,
    reference=align_reference,
    make_inputs=_align_inputs,
    sizes=[
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
    ],
    bench_sizes=[
        {"tokens": t, "top_k": 8, "experts": 256, "block_size": 64, "skew": 0, "holes": 0}
        for t in (1, 16, 128, 1024, 8192)
    ],
    tolerance=0.0,
    bench_needs={},
    paper="https://arxiv.org/abs/2211.15841",
)
SPECS = [_ROUTE, _ALIGN]
define(SPECS)
