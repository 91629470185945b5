"""The specs of the kernels that write the KV pool."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    in_outs,
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
from kiln.jit_kernels.ops.kv import cases
from kiln.jit_kernels.ops.kv.checks import CHUNK
from kiln.jit_kernels.ops.kv.reference import (
    copy_blocks_reference,
    rope_store_error,
    rope_store_reference,
)
from kiln.jit_kernels.ops.norm.factors import FACTORS, derived_of
from kiln.jit_kernels.torch_ops import define

_ROPE_THREADS = 128  # per block, if there are enough heads
_VECTORS_IN_FLIGHT = 4  # per thread; kInFlight of copy_blocks.cu
_COPY_THREADS = 128
_MOST_PAIRS = 2**16 - 1  # the limit of a grid dimension
_POOL_KINDS = ("SCALAR_T", "kiln::e4m3")  # kv_t: the model's dtype, or fp8


def _rope_store_bind(a: Arguments) -> Bound:
    tokens, heads, head_dim = a.query.shape
    kv_heads, block_size = a.key.shape[1], a.key_pool.shape[2]
    is_power = block_size & (block_size - 1) == 0
    numbers = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "half": a.cos_sin_table.shape[1] // 2,
        "block_size": block_size,
        "block_shift": block_size.bit_length() - 1 if is_power else -1,
        "out_stride": a.out.stride(0),
        "out_head_stride": a.out.stride(1),
        "query_stride": a.query.stride(0),
        "query_head_stride": a.query.stride(1),
        "key_stride": a.key.stride(0),
        "key_head_stride": a.key.stride(1),
        "value_stride": a.value.stride(0),
        "value_head_stride": a.value.stride(1),
        "key_block": a.key_pool.stride(0),
        "key_head": a.key_pool.stride(1),
        "key_place": a.key_pool.stride(2),
        "value_block": a.value_pool.stride(0),
        "value_head": a.value_pool.stride(1),
        "value_place": a.value_pool.stride(2),
        "inverse_dim": 1 / head_dim,
        **derived_of(a),
    }
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Bound(variant_of(a.query.dtype, a.key_pool.dtype), sizes, numbers)


def variant_of(dtype: torch.dtype, pool_dtype: torch.dtype) -> Variant:
    """Return rope_store's variant for a model's dtype and a pool's."""
    return {"scalar_t": SCALARS[dtype], "kv_t": _POOL_KINDS[pool_dtype == torch.float8_e4m3fn]}


def _supported(variant: Variant) -> bool:
    """Only a bf16 model may have an fp8 pool."""
    return variant["kv_t"] == "SCALAR_T" or variant["scalar_t"] == "kiln::bf16"


def _rope_store_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Give each head a team of threads with two chunks each, and each token enough blocks."""
    chunks = sizes["head_dim"] // CHUNK
    team = 1 << max((chunks + 1) // 2 - 1, 0).bit_length()
    all_heads = sizes["heads"] + 2 * sizes["kv_heads"]
    per_warp = 32 // team
    heads = min(-(-all_heads // per_warp) * per_warp, _ROPE_THREADS // team)
    return LaunchGeometry((sizes["tokens"], -(-all_heads // heads), 1), (team, heads, 1))


def _rope_store_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, head_dim, kv_heads = sizes["tokens"], sizes["head_dim"], sizes["kv_heads"]
    size = DTYPES[variant["scalar_t"]].itemsize
    stored = 1 if variant["kv_t"] == "kiln::e4m3" else size
    elements = tokens * (sizes["heads"] + 2 * kv_heads) * head_dim
    moved = elements * size + tokens * head_dim * (sizes["heads"] * size + 2 * kv_heads * stored)
    angles = tokens * (16 + 4 * sizes.get("rotary_dim", head_dim))
    return Cost(moved + angles + 2 * head_dim * size, 6 * elements)


def _copy_blocks_bind(a: Arguments) -> Bound:
    size, num_pairs = a.pool.element_size(), a.pairs.shape[0]
    block_bytes = a.pool[0, 0].numel() * size
    numbers = {
        "num_pairs": num_pairs,
        "block_bytes": block_bytes,
        "pool_stride": a.pool.stride(0) * size,
        "block_stride": a.pool.stride(1) * size,
    }
    sizes = {"pairs": num_pairs, "pools": a.pool.shape[0], "block_bytes": block_bytes}
    return Bound({}, sizes, numbers)


def _copy_blocks_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    pieces = -(-sizes["block_bytes"] // (_COPY_THREADS * _VECTORS_IN_FLIGHT * 16))
    pairs = min(sizes["pairs"], _MOST_PAIRS)  # a block loops over the rest
    return LaunchGeometry((pieces, sizes["pools"], pairs), (_COPY_THREADS, 1, 1))


def _copy_blocks_cost(variant: Variant, sizes: Sizes) -> Cost:
    moved = 2 * sizes["pairs"] * sizes["pools"] * sizes["block_bytes"]
    return Cost(moved + 16 * sizes["pairs"], 0)


ROPE_STORE = KernelSpec(
    name="rope_store",
    source="kv/rope_store.cu",
    entry="rope_store",
    parameters=declare(
        outputs("out"),
        in_outs("key_pool", "value_pool"),
        inputs("query", "key", "value", "positions", "cos_sin_table", "slot_mapping"),
        optional("query_weight", "key_weight"),
        derived("int32", "heads", "kv_heads", "head_dim", "half", "block_size", "block_shift"),
        derived("int64", "out_stride", "out_head_stride", "query_stride", "query_head_stride"),
        derived("int64", "key_stride", "key_head_stride", "value_stride", "value_head_stride"),
        derived("int64", "key_block", "key_head", "key_place"),
        derived("int64", "value_block", "value_head", "value_place"),
        derived("float", "inverse_dim"),
        FACTORS,
        values("float", "k_scale", "v_scale"),
    ),
    params={"scalar_t": list(DTYPES), "kv_t": _POOL_KINDS},
    bind=_rope_store_bind,
    geometry=_rope_store_geometry,
    cost=_rope_store_cost,
    reference=rope_store_reference,
    make_inputs=cases.rope_store_inputs,
    sizes=cases.ROPE_STORE_SIZES,
    bench_sizes=cases.ROPE_STORE_BENCH_SIZES,
    is_supported=_supported,
    tolerance=1.0,  # relative to rope_store_error's tolerance per dtype
    error=rope_store_error,
    paper="https://arxiv.org/abs/2104.09864",
)
COPY_BLOCKS = KernelSpec(
    name="copy_blocks",
    source="kv/copy_blocks.cu",
    entry="copy_blocks",
    parameters=declare(
        in_outs("pool"),
        inputs("pairs"),
        derived("int64", "num_pairs", "block_bytes", "pool_stride", "block_stride"),
    ),
    params={},
    bind=_copy_blocks_bind,
    geometry=_copy_blocks_geometry,
    cost=_copy_blocks_cost,
    reference=copy_blocks_reference,
    make_inputs=cases.copy_blocks_inputs,
    sizes=cases.COPY_BLOCKS_SIZES,
    bench_sizes=cases.COPY_BLOCKS_BENCH_SIZES,
    tolerance=0.0,
    paper="https://arxiv.org/abs/2309.06180",
)
SPECS = [ROPE_STORE, COPY_BLOCKS]
define(SPECS)
