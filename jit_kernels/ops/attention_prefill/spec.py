"""The specs of prefill attention."""

from __future__ import annotations

from dataclasses import replace

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
from kiln.jit_kernels.ops.attention.variants import E4M3, PARAMS, SAME, is_supported, variant_of
from kiln.jit_kernels.ops.attention.visible import first_visible
from kiln.jit_kernels.ops.attention_prefill import cases
from kiln.jit_kernels.ops.attention_prefill.cases import head_dim, ragged
from kiln.jit_kernels.ops.attention_prefill.reference import (
    plan_reference,
    prefill_error,
    prefill_reference,
)
from kiln.jit_kernels.ops.attention_prefill.tiles import TILE_KEYS, TILE_ROWS, most_tiles
from kiln.jit_kernels.torch_ops import define

_PLAN_THREADS = 512
_WGMMA_KEYS = 128  # keys per tile
_WIDE = 128  # the largest head_tile with which two blocks fit in a multiprocessor


def _plan_bind(a: Arguments) -> Bound:
    return Bound({}, {}, {"num_requests": a.seq_lens.shape[0], "capacity": a.items.shape[0] - 1})


def _prefill_bind(a: Arguments) -> Bound:
    numbers = {
        **strides_of(a),
        "num_heads": a.query.shape[1],
        "num_kv_heads": a.key_pool.shape[1],
        "head_dim": a.query.shape[2],
        "qk_scale": a.scale * a.k_scale,
    }
    return Bound({**variant_of(a), "soft_cap": "true" if a.soft_cap else "false"}, {}, numbers)


def _is_supported(variant: Variant) -> bool:
    """Return whether a variant is built; soft cap only for the dtype and the head_dims of Gemma."""
    gemma = variant["scalar_t"] == "kiln::bf16" and variant["head_tile"] != "64"
    return is_supported(variant) and (gemma or variant["soft_cap"] == "false")


def _plan_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((1, 1, 1), (_PLAN_THREADS, 1, 1))


def _shared_bytes(variant: Variant) -> int:
    """Return the bytes of queries, keys and values; rows are an odd number of 16 bytes apart."""
    tile, fp8 = int(variant["head_tile"]), variant["kv_t"] == E4M3
    row, narrow = (tile // 8 | 1) * 16, (tile // 16 | 1) * 16
    key_tiles = 1 if fp8 or tile > _WIDE else 2
    shared = TILE_ROWS * row + (key_tiles + 1) * TILE_KEYS * row
    return shared + (2 * TILE_KEYS * narrow if fp8 else 0)


def _prefill_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return as many blocks as run at once; they read their work from the plan."""
    shared, wide = _shared_bytes(variant), int(variant["head_tile"]) <= _WIDE
    resident = max(1, min(2 if wide else 1, gpu.max_shared_bytes // (shared + 2048)))
    grid = (gpu.num_multiprocessors * resident, 1, 1)
    return LaunchGeometry(grid, (128 if wide else 256, 1, 1), shared)


def _wgmma_shared_bytes(variant: Variant) -> int:
    """Return the bytes of queries, and two tiles each of keys and values, aligned to 1024."""
    return 1024 + 2 * int(variant["head_tile"]) * (TILE_ROWS + 4 * _WGMMA_KEYS)


def _wgmma_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    grid = (gpu.num_multiprocessors, 1, 1)
    return LaunchGeometry(grid, (256, 1, 1), _wgmma_shared_bytes(variant))


def _plan_cost(variant: Variant, sizes: Sizes) -> Cost:
    requests = ragged(sizes)
    tokens = sum(count for _, count in requests)
    tiles = 1 + most_tiles(len(requests), tokens, sizes["group"])
    return Cost(16 * tokens + 16 * tiles + 12 * len(requests) + 4, 16 * len(requests))


def _prefill_cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count the products under the causal mask, and each key and value once per request."""
    dim, size = head_dim(variant, sizes), DTYPES[variant["scalar_t"]].itemsize
    stored = size if variant["kv_t"] == SAME else 1
    window, heads = sizes.get("window", 0), sizes["kv_heads"] * sizes["group"]
    moved = pairs = 0
    for keys, tokens in ragged(sizes):
        ends = range(keys - tokens + 1, keys + 1)
        pairs += sum(end - max(first_visible(end, window), 0) for end in ends if end > 0)
        seen = keys - max(first_visible(ends.start, window), 0)
        moved += 2 * seen * sizes["kv_heads"] * dim * stored + tokens * heads * (2 * dim * size + 4)
    requests = len(ragged(sizes))
    moved += 8 * requests + 4 + 4 * heads * sizes.get("sinks", 0)
    return Cost(moved + 16 * most_tiles(requests, moved, 1), 4 * pairs * heads * dim)


PREFILL_PLAN = KernelSpec(
    name="prefill_plan",
    source="attention_prefill/prefill_plan.cu",
    entry="prefill_plan",
    parameters=declare(
        outputs("items"),
        inputs("seq_lens", "cu_seqlens_q"),
        derived("int32", "num_requests", "capacity"),
        values("int32", "group", "window"),
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
    paper="https://arxiv.org/abs/2307.08691",
)
PAGED_PREFILL = KernelSpec(
    name="paged_prefill",
    source="attention_prefill/paged_prefill.cu",
    entry="paged_prefill",
    parameters=declare(
        TENSORS,
        inputs("seq_lens", "cu_seqlens_q", "items"),
        scratch("counter"),
        optional("sinks"),
        STRIDES,
        derived("int32", "num_heads", "num_kv_heads", "head_dim"),
        values("int32", "window"),
        operator_only("float", "scale", "k_scale"),
        derived("float", "qk_scale"),
        values("float", "soft_cap", "v_scale"),
    ),
    params={**PARAMS, "soft_cap": ["false", "true"]},
    bind=_prefill_bind,
    geometry=_prefill_geometry,
    cost=_prefill_cost,
    reference=prefill_reference,
    make_inputs=cases.prefill_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=MOST_UNITS,
    is_supported=_is_supported,
    min_arch=80,
    max_cpu_seconds=1.0,
    shared_bytes=lambda variant, gpu: _shared_bytes(variant),
    error=prefill_error,
    bench_needs={"scalar_t": "kiln::bf16", "head_tile": "128", "kv_t": SAME, "soft_cap": "false"},
    paper="https://arxiv.org/abs/2307.08691",
)
PAGED_PREFILL_WGMMA = replace(
    PAGED_PREFILL,
    name="paged_prefill_wgmma",
    source="attention_prefill/paged_prefill_wgmma.cu",
    entry="paged_prefill_wgmma",
    params={**PARAMS, "head_tile": ["64", "128"], "kv_t": [SAME], "soft_cap": ["false"]},
    geometry=_wgmma_geometry,
    sizes=cases.WGMMA_SIZES,
    is_supported=lambda variant: True,
    replaces=PAGED_PREFILL.name,
    only_arch="sm_90a",
    min_arch=90,
    shared_bytes=lambda variant, gpu: _wgmma_shared_bytes(variant),
)
SPECS = [PREFILL_PLAN, PAGED_PREFILL, PAGED_PREFILL_WGMMA]
define(SPECS)
