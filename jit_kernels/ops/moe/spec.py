"""The specs of the MoE kernels."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
    optional,
    outputs,
    values,
)
from kiln.jit_kernels.declare.spec import (
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
from kiln.jit_kernels.ops.moe import cases
from kiln.jit_kernels.ops.moe.reference import align_capacity, align_reference, route_reference
from kiln.jit_kernels.ops.moe.routing_error import route_error
from kiln.jit_kernels.torch_ops import define

_CAPACITIES = ("256", "512")  # maximum number of experts of route_tokens' variants
# Routers compute in float32 or bf16 for any dtype of the model; others are converted to float32.
_LOGITS = ("float", "kiln::bf16")
_WARPS = 4
_ALIGN_PAIRS, _MOST_ALIGN_BLOCKS = 2048, 16  # pairs per block
_ALIGN_THREADS = 512


def expert_capacity(num_experts: int) -> str:
    """Return the smallest ``max_experts`` that supports so many experts."""
    return next(text for text in _CAPACITIES if num_experts <= int(text))


def variant_of(logits: torch.Tensor) -> Variant:
    """Return route_tokens' variant for logits [tokens, experts]."""
    return {"router_t": SCALARS[logits.dtype], "max_experts": expert_capacity(logits.shape[1])}


def _supported(variant: Variant) -> bool:
    return dict(variant) != {"router_t": "kiln::bf16", "max_experts": "512"}


def _route_bind(a: Arguments) -> Bound:
    tokens, experts = a.logits.shape
    numbers = {
        "tokens": tokens,
        "logits_stride": a.logits.stride(0),
        "experts": experts,
        "top_k": a.ids.shape[1],
    }
    return Bound(variant_of(a.logits), {"tokens": tokens}, numbers)


def _route_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    blocks = -(-sizes["tokens"] // _WARPS)
    return LaunchGeometry((min(blocks, 2**31 - 1), 1, 1), (32 * _WARPS, 1, 1))


def _route_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, experts = sizes["tokens"], int(variant["max_experts"]) - sizes["spare"]
    logits = tokens * experts * DTYPES[variant["router_t"]].itemsize
    return Cost(
        logits + 4 * experts * sizes["bias"] + 8 * tokens * sizes["top_k"], 8 * tokens * experts
    )


def _align_bind(a: Arguments) -> Bound:
    tokens, top_k = a.ids.shape
    experts = a.expert_ends.numel()
    numbers = {
        "pairs": a.ids.numel(),
        "experts": experts,
        "capacity": a.sorted_token_ids.numel(),
        "blocks": a.expert_ids.numel(),
    }
    return Bound({}, {"tokens": tokens, "top_k": top_k, "experts": experts}, numbers)


def _align_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return one block; with many pairs several blocks, which divide the experts."""
    wanted = -(-sizes["tokens"] * sizes["top_k"] // _ALIGN_PAIRS)
    blocks = max(1, min(wanted, _MOST_ALIGN_BLOCKS, sizes["experts"]))
    return LaunchGeometry((blocks, 1, 1), (_ALIGN_THREADS, 1, 1))


def _align_cost(variant: Variant, sizes: Sizes) -> Cost:
    pairs, experts = sizes["tokens"] * sizes["top_k"], sizes["experts"]
    capacity = align_capacity(pairs, experts, sizes["block_size"])
    return Cost(4 * (pairs + capacity + capacity // sizes["block_size"] + 1 + experts), 0)


ROUTE_TOKENS = KernelSpec(
    name="route_tokens",
    source="moe/route_tokens.cu",
    entry="route_tokens",
    parameters=declare(
        outputs("weights", "ids"),
        inputs("logits"),
        optional("bias"),
        derived("int64", "tokens", "logits_stride"),
        derived("int32", "experts", "top_k"),
        values("int32", "num_groups", "top_groups"),
        values("bool", "by_largest", "sigmoid", "renormalise"),
        values("float", "least_sum", "factor"),
    ),
    params={"router_t": _LOGITS, "max_experts": list(_CAPACITIES)},
    is_supported=_supported,
    bind=_route_bind,
    geometry=_route_geometry,
    cost=_route_cost,
    reference=route_reference,
    make_inputs=cases.route_inputs,
    sizes=cases.ROUTE_SIZES,
    bench_sizes=cases.ROUTE_BENCH_SIZES,
    tolerance=1e-6,
    error=route_error,
    bench_needs={"router_t": "float", "max_experts": "256"},
    max_cpu_seconds=0.4,
    paper="https://arxiv.org/abs/2412.19437",
)
ALIGN_TOKENS = KernelSpec(
    name="align_tokens",
    source="moe/align_tokens.cu",
    entry="align_tokens",
    parameters=declare(
        outputs("sorted_token_ids", "expert_ids", "num_tokens_post_padded", "expert_ends"),
        inputs("ids"),
        derived("int32", "pairs", "experts"),
        values("int32", "block_size"),
        derived("int32", "capacity", "blocks"),
    ),
    params={},
    bind=_align_bind,
    geometry=_align_geometry,
    cost=_align_cost,
    reference=align_reference,
    make_inputs=cases.align_inputs,
    sizes=cases.ALIGN_SIZES,
    bench_sizes=cases.ALIGN_BENCH_SIZES,
    tolerance=0.0,
    bench_needs={},
    paper="https://arxiv.org/abs/2211.15841",
)
SPECS = [ROUTE_TOKENS, ALIGN_TOKENS]
define(SPECS)
