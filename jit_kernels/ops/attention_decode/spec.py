"""The specs of decode attention."""

from __future__ import annotations

import math
from itertools import pairwise

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
    operator_only,
    optional,
    outputs,
    scratch,
    values,
)
from kiln.jit_kernels.declare.spec import (
    DTYPES,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.ops.attention.error import MOST_UNITS
from kiln.jit_kernels.ops.attention.parameters import STRIDES, TENSORS, strides_of
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK, PARAMS, SAME, is_supported, variant_of
from kiln.jit_kernels.ops.attention.visible import first_visible
from kiln.jit_kernels.ops.attention_decode import cases
from kiln.jit_kernels.ops.attention_decode.cases import ragged, shape_of
from kiln.jit_kernels.ops.attention_decode.reference import (
    decode_error,
    decode_reference,
    plan_reference,
    shared_reference,
)
from kiln.jit_kernels.ops.attention_decode.splits import ITEM_INTS
from kiln.jit_kernels.torch_ops import define

_LOG2E = math.log2(math.e)
_PLAN_BLOCKS, _PLAN_THREADS = 2, 128  # blocks per multiprocessor
_INVERSE = 2**20  # i // group is i * (_INVERSE // group + 1) // _INVERSE, for rows of a tile


def _plan_bind(a: Arguments) -> Bound:
    requests = a.seq_lens.shape[0]
    numbers = {
        "table_row": a.block_table.stride(0),
        "num_requests": requests,
        "capacity": a.items.shape[0] - 1,
    }
    return Bound({}, {"requests": requests}, numbers)


def _shared_bind(a: Arguments) -> Bound:
    requests = a.seq_lens.shape[0]
    return Bound(
        {},
        {"requests": requests},
        {"table_row": a.block_table.stride(0), "num_requests": requests},
    )


def _decode_bind(a: Arguments) -> Bound:
    kv_heads = a.key_pool.shape[1]
    group, cap = a.query.shape[1] // kv_heads, a.soft_cap
    numbers = {
        **strides_of(a),
        "capacity": a.items.shape[0] - 1,
        "mail_rows": a.mail.shape[0],
        "group": group,
        "inverse_group": _INVERSE // group + 1,
        "head_dim": a.query.shape[2],
        "qk_scale_log2": a.scale * a.k_scale * _LOG2E,
        "soft_cap_log2": cap * _LOG2E,
        "steepness": 2 / cap if cap else 0.0,
    }
    return Bound(variant_of(a), {"kv_heads": kv_heads}, numbers)


def _plan_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return one block per request and one for the header; a large GPU runs 263 at once."""
    blocks = min(sizes["requests"] + 1, _PLAN_BLOCKS * gpu.num_multiprocessors)
    return LaunchGeometry((blocks, 1, 1), (_PLAN_THREADS, 1, 1))


def _shared_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return a warp per request."""
    warps = _PLAN_THREADS // 32
    return LaunchGeometry((max(1, -(-sizes["requests"] // warps)), 1, 1), (_PLAN_THREADS, 1, 1))


def _decode_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return as many blocks as run at once, in pairs; they read their work from the plan."""
    shape, kv_heads = shape_of(variant), sizes["kv_heads"]
    grid = (kv_heads, shape.places(kv_heads, gpu), 1)
    return LaunchGeometry(grid, (32 * shape.warps, 1, 1), shape.shared_bytes(gpu))


def _plan_cost(variant: Variant, sizes: Sizes) -> Cost:
    requests = ragged(sizes)
    table = 4 * ITEM_INTS * (1 + cases.room(sizes)[0])
    return Cost(table + 8 * len(requests) + 4, 16 * len(requests))


def _shared_cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count the ids that equal those before them, one that differs, and the lengths."""
    ids = 0
    for (length, _), (other, _) in pairwise(ragged(sizes)):
        equal = min(length, other, sizes.get("shared", 0)) // KV_BLOCK
        ids += 2 * min(equal + 1, -(-min(length, other) // KV_BLOCK))
    return Cost(4 * ids + 8 * len(ragged(sizes)), ids)


def _decode_cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count the visible keys and values, query, out and lse."""
    shape, itemsize = shape_of(variant), DTYPES[variant["scalar_t"]].itemsize
    requests, window = ragged(sizes), sizes.get("window", 0)
    heads = sizes["kv_heads"] * sizes["group"]
    head_dim = shape.head_tile - sizes.get("less", 0)
    seen = sum(
        length - max(0, first_visible(length - tokens + 1, window)) for length, tokens in requests
    )
    for length, _ in requests[1:]:  # shared keys count once
        seen -= min(sizes.get("shared", 0), length) // KV_BLOCK * KV_BLOCK
    moved = 2 * seen * sizes["kv_heads"] * head_dim * shape.kv_bytes
    moved += sum(tokens for _, tokens in requests) * heads * (2 * head_dim * itemsize + 4)
    moved += 8 * len(requests) + 4 + 4 * heads * sizes.get("sinks", 0)
    pairs = sum(length * tokens for length, tokens in requests)
    return Cost(moved, 4 * pairs * heads * head_dim)


SHARED_BLOCKS = KernelSpec(
    name="shared_blocks",
    source="attention_decode/shared_blocks.cu",
    entry="shared_blocks",
    parameters=declare(
        outputs("shared"),
        inputs("block_table", "seq_lens"),
        derived("int64", "table_row"),
        derived("int32", "num_requests"),
    ),
    params={},
    bind=_shared_bind,
    geometry=_shared_geometry,
    cost=_shared_cost,
    reference=shared_reference,
    make_inputs=cases.shared_inputs,
    sizes=cases.SHARED_SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=0.0,
    min_arch=80,
    paper="https://arxiv.org/abs/2402.05099",
)
ATTENTION_PLAN = KernelSpec(
    name="attention_plan",
    source="attention_decode/attention_plan.cu",
    entry="attention_plan",
    parameters=declare(
        outputs("items"),
        inputs("block_table", "seq_lens", "cu_seqlens_q", "shared"),
        derived("int64", "table_row"),
        derived("int32", "num_requests", "capacity"),
        values("int32", "group", "window"),
        values("int32", "max_splits", "split_blocks", "few_splits", "longer", "warp_bits"),
    ),
    params={},
    bind=_plan_bind,
    geometry=_plan_geometry,
    cost=_plan_cost,
    reference=plan_reference,
    make_inputs=cases.plan_inputs,
    sizes=cases.PLAN_SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=0.0,
    min_arch=80,
    paper="https://crfm.stanford.edu/2023/10/12/flashdecoding.html",
)
PAGED_ATTENTION = KernelSpec(
    name="paged_attention",
    source="attention_decode/paged_attention.cu",
    entry="paged_attention",
    parameters=declare(
        TENSORS,
        operator_only("pointer", "seq_lens", "cu_seqlens_q"),
        inputs("items"),
        optional("sinks"),
        scratch("partials", "mail", "arrivals"),
        STRIDES,
        derived("int32", "capacity", "mail_rows", "group", "inverse_group", "head_dim"),
        values("int32", "window"),
        operator_only("float", "scale", "soft_cap", "k_scale"),
        derived("float", "qk_scale_log2", "soft_cap_log2", "steepness"),
        values("float", "v_scale"),
    ),
    params=PARAMS,
    bind=_decode_bind,
    geometry=_decode_geometry,
    cost=_decode_cost,
    reference=decode_reference,
    make_inputs=cases.decode_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=MOST_UNITS,
    is_supported=is_supported,
    min_arch=80,
    max_cpu_seconds=1.0,
    shared_bytes=lambda variant, gpu: shape_of(variant).shared_bytes(gpu),
    error=decode_error,
    bench_needs={"scalar_t": "kiln::bf16", "head_tile": "128", "kv_t": SAME},
    paper="https://crfm.stanford.edu/2023/10/12/flashdecoding.html",
)
SPECS = [SHARED_BLOCKS, ATTENTION_PLAN, PAGED_ATTENTION]
define(SPECS)
