"""What writes the KV pool: rope_store, once a layer and step, and copy_blocks."""

from __future__ import annotations

from functools import cache

import torch

from kiln.jit_kernels.choose import choice
from kiln.jit_kernels.references.kv import (
    check_heads,
    check_pool,
    check_slots,
    copy_blocks_reference,
    rope_store_error,
    rope_store_reference,
)
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.shapes import check_dtype, check_shape, takes_arrays
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

_CHUNK = 8  # elements of a head that a thread holds; kChunk of the template
_MAX_HEAD_DIM = 256
_ROPE_THREADS = 128  # of a block, where the heads are as many
_VECTORS_IN_FLIGHT = 4  # of a thread; kInFlight of copy_blocks
_COPY_THREADS = 128
_MOST_PAIRS = 2**16 - 1  # of a grid
_POOL_KINDS = ("SCALAR_T", "kiln::e4m3")  # kv_t: as the model, or fp8


def serves(head_dim: int, rotary_dim: int) -> bool:
    """Return whether rope_store takes heads of these sizes: vectors must not straddle halves."""
    return head_dim % _CHUNK == 0 and head_dim <= _MAX_HEAD_DIM and rotary_dim % (2 * _CHUNK) == 0


@cache
def is_one_launch(
    device_type: str, dtype: torch.dtype, pool_dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> bool:
    """Return whether rope_store runs as a kernel for such heads: on a GPU unless torch is chosen.

    On a CPU, where ``KILN_CPU_KERNELS`` runs kernels there. Elsewhere its reference would run, and
    an operation for each part is quicker. Decided once a process.
    """
    if not serves(head_dim, rotary_dim):
        return False
    comes = _ROPE_STORE.has_variant(_variant(dtype, pool_dtype))
    if device_type == "cuda":
        chosen = choice("kv").implementation
        return chosen == "triton" or (chosen == "jit" and comes)
    return comes and settings().cpu_kernels != "torch" and settings().kernel_choice("kv") != "torch"


@takes_arrays
def rope_store(  # noqa: PLR0913 (all that a token needs on its way)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    *,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate query and key, store key and value in the pool, return the query.

    Bit for bit rms_norm with the weights [head_dim] where there are any, then apply_rotary, then a
    copy to the slots. query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens,
    num_kv_heads, head_dim]; positions, slot_mapping: [num_tokens] int64; cos_sin_table as
    apply_rotary takes it; pools: [num_blocks, num_kv_heads, block_size, head_dim], strided. Slot s
    is place s % block_size of block s // block_size, slot -1 stores nothing. A pool is of the
    model's dtype or float8_e4m3fn, which holds x / scale, saturating. ``out`` is where the query
    goes: query itself where it is None.

    Raises ValueError on a wrong shape, on rows that are not 16-byte aligned, on sizes that
    ``serves`` refuses and on more than 2^32 slots where block_size is no power of two; TypeError on
    a wrong dtype.
    """
    out = query if out is None else out
    _check(query, key, value, out, cos_sin_table)
    check_pool("key_pool", key_pool, query.dtype, k_scale)
    check_pool("value_pool", value_pool, query.dtype, v_scale)
    tokens, kv_heads, head_dim = key.shape
    blocks, _, block_size, _ = key_pool.shape
    check_shape("rope_store", "key_pool", key_pool, (blocks, kv_heads, block_size, head_dim))
    check_shape("rope_store", "value_pool", value_pool, key_pool.shape)
    check_slots(blocks, block_size)
    if key_pool.dtype != value_pool.dtype:
        raise TypeError(f"rope_store: pools are {key_pool.dtype} and {value_pool.dtype}")
    for name, index in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_shape("rope_store", name, index, (tokens,))
        if index.dtype != torch.int64:
            raise TypeError(f"rope_store: {name} is {index.dtype}, want torch.int64")
    if (query_weight is None) != (key_weight is None):
        raise ValueError("rope_store: give query_weight and key_weight, or neither")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        if weight is not None:
            check_dtype("rope_store", query=query, **{name: weight})
            check_shape("rope_store", name, weight, (head_dim,))
    call(
        _ROPE_STORE, out, key_pool, value_pool, query, key, value, positions.contiguous(),
        cos_sin_table.contiguous(), slot_mapping.contiguous(), query_weight, key_weight, eps,
        k_scale, v_scale,
    )  # fmt: skip
    return out


@takes_arrays
def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within each of some pools: pool[:, target] = pool[:, source], in one launch.

    pool: [num_pools, num_blocks, ...], each block dense, 16-byte aligned and of a multiple of 16
    bytes; one view may hold keys and values of all layers. pairs: [num_pairs, 2] int64, source and
    target; a target stands in no other pair, and a negative source is padding. Raises ValueError
    on a wrong shape or layout, TypeError on pairs that are not int64.
    """
    if pairs.dtype != torch.int64:
        raise TypeError(f"copy_blocks: pairs is {pairs.dtype}, want torch.int64")
    check_shape("copy_blocks", "pairs", pairs, (pairs.shape[0], 2))
    size = pool.element_size()
    block = pool[0, 0] if pool.dim() >= 2 and pool.numel() else pool
    steps = (pool.data_ptr(), block.numel() * size, *(s * size for s in pool.stride()[:2]))
    if pool.dim() < 2 or not block.is_contiguous() or any(step % 16 for step in steps):
        raise ValueError(
            f"copy_blocks: pool {list(pool.shape)} has strides {pool.stride()}; want dense blocks, "
            f"16-byte aligned and of a multiple of 16 bytes"
        )
    if pool.numel():
        call(_COPY_BLOCKS, pool, pairs.contiguous())


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
) -> None:
    check_dtype("rope_store", query=query, key=key, value=value, out=out)
    if table.dtype != torch.float32:
        raise TypeError(f"rope_store: cos_sin_table is {table.dtype}, want torch.float32")
    for name, x in (("query", query), ("key", key), ("value", value), ("out", out)):
        check_heads(name, x)
    tokens, _, head_dim = key.shape
    check_shape("rope_store", "value", value, key.shape)
    check_shape("rope_store", "query", query, (tokens, query.shape[1], head_dim))
    check_shape("rope_store", "out", out, query.shape)
    if table.dim() != 2 or table.shape[1] > head_dim or not serves(head_dim, table.shape[1]):
        raise ValueError(
            f"rope_store: head_dim is {head_dim} and cos_sin_table {list(table.shape)}; want a "
            f"multiple of {_CHUNK} up to {_MAX_HEAD_DIM}, and [max_position, rotary_dim] with a "
            f"multiple of {2 * _CHUNK} up to head_dim"
        )


def _rope_store_bind(  # noqa: PLR0913 (the operator's arguments)
    out: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> Bound:
    tokens, heads, head_dim = query.shape
    kv_heads, half = key.shape[1], cos_sin_table.shape[1] // 2
    block_size = key_pool.shape[2]
    shift = block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1
    strides = [s for x in (out, query, key, value) for s in x.stride()[:2]]
    strides += [*key_pool.stride()[:3], *value_pool.stride()[:3]]
    values = (
        out, key_pool, value_pool, query, key, value, positions, cos_sin_table, slot_mapping,
        0 if query_weight is None else query_weight, 0 if key_weight is None else key_weight,
        heads, kv_heads, head_dim, half, block_size, shift, *strides,
        1 / head_dim, eps, k_scale, v_scale,
    )  # fmt: skip
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Bound(_variant(query.dtype, key_pool.dtype), sizes, values)


def _variant(dtype: torch.dtype, pool_dtype: torch.dtype) -> Variant:
    kind = _POOL_KINDS[pool_dtype == torch.float8_e4m3fn]
    return {"scalar_t": SCALARS[dtype], "kv_t": kind}


def _rope_store_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Give a head a team of threads with two chunks each, a token as many blocks as it needs."""
    chunks = sizes["head_dim"] // _CHUNK
    team = 1 << max((chunks + 1) // 2 - 1, 0).bit_length()
    all_heads = sizes["heads"] + 2 * sizes["kv_heads"]
    a_warp = 32 // team
    heads = min(-(-all_heads // a_warp) * a_warp, _ROPE_THREADS // team)
    return LaunchGeometry((sizes["tokens"], -(-all_heads // heads), 1), (team, heads, 1))


def _rope_store_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, head_dim, kv_heads = sizes["tokens"], sizes["head_dim"], sizes["kv_heads"]
    size = DTYPES[variant["scalar_t"]].itemsize
    stored = 1 if variant["kv_t"] == "kiln::e4m3" else size
    elements = tokens * (sizes["heads"] + 2 * kv_heads) * head_dim
    moved = elements * size + tokens * head_dim * (sizes["heads"] * size + 2 * kv_heads * stored)
    angles = tokens * (16 + 4 * sizes.get("rotary_dim", head_dim))
    return Cost(moved + angles + 2 * head_dim * size, 6 * elements)


def _rope_store_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[object, ...]:
    dtype, fp8 = DTYPES[variant["scalar_t"]], variant["kv_t"] == "kiln::e4m3"
    tokens, heads, kv_heads = sizes["tokens"], sizes["heads"], sizes["kv_heads"]
    head_dim, block_size = sizes["head_dim"], sizes.get("block_size", 16)
    all_heads = heads + 2 * kv_heads
    qkv = torch.randn(tokens, all_heads * head_dim + sizes.get("gap", 0), device=device).to(dtype)
    split = qkv[:, : all_heads * head_dim].view(tokens, all_heads, head_dim)
    query, key, value = torch.split(split, [heads, kv_heads, kv_heads], dim=1)
    blocks = -(-tokens // block_size) + 2
    # Both pools interleaved, the heads outside of a block's tokens: as the engine keeps them.
    pool = torch.randn(blocks, 2, kv_heads, block_size, head_dim, device=device)
    pool = pool.to(torch.float8_e4m3fn if fp8 else dtype)
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]
    if "unstored" in sizes:
        slots[sizes["unstored"] :: 3] = -1
    angles = torch.rand(64, sizes.get("rotary_dim", head_dim) // 2, device=device) * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weights: list[torch.Tensor | None] = [None, None]
    if sizes.get("norm", 0):
        weights = [torch.rand(head_dim, device=device).add_(0.5).to(dtype) for _ in range(2)]
    scales = (0.75, 0.5) if fp8 else (1.0, 1.0)
    positions = torch.randint(64, (tokens,), device=device)
    out = query.new_empty(query.shape)
    return (
        out, pool[:, 0], pool[:, 1], query, key, value, positions, table, slots, *weights, 1e-6,
        *scales,
    )  # fmt: skip


def _copy_blocks_bind(pool: torch.Tensor, pairs: torch.Tensor) -> Bound:
    size = pool.element_size()
    block_bytes = pool[0, 0].numel() * size
    sizes = {"pairs": pairs.shape[0], "pools": pool.shape[0], "block_bytes": block_bytes}
    strides = (pool.stride(0) * size, pool.stride(1) * size)
    return Bound({}, sizes, (pool, pairs, pairs.shape[0], block_bytes, *strides))


def _copy_blocks_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    pieces = -(-sizes["block_bytes"] // (_COPY_THREADS * _VECTORS_IN_FLIGHT * 16))
    pairs = min(sizes["pairs"], _MOST_PAIRS)  # more come one after another
    return LaunchGeometry((pieces, sizes["pools"], pairs), (_COPY_THREADS, 1, 1))


def _copy_blocks_cost(variant: Variant, sizes: Sizes) -> Cost:
    moved = 2 * sizes["pairs"] * sizes["pools"] * sizes["block_bytes"]
    return Cost(moved + 16 * sizes["pairs"], 0)


def _copy_blocks_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[torch.Tensor, ...]:
    num, pools, elements = sizes["pairs"], sizes["pools"], sizes["block_bytes"] // 2
    both = torch.randn(pools, 2 * num + 1, elements + sizes.get("gap", 0), device=device)
    pairs = torch.randperm(2 * num + 1, device=device)[: 2 * num].view(num, 2)
    pairs[2::3, 0] = -1
    return both.to(torch.bfloat16)[..., :elements], pairs


def _rope_store_comes(variant: Variant) -> bool:
    """Leave out an fp8 pool for any model but a bf16 one."""
    return variant["kv_t"] == "SCALAR_T" or variant["scalar_t"] == "kiln::bf16"


_ROPE_STORE = KernelSpec(
    name="rope_store",
    source="kv/rope_store.cu",
    entry="rope_store",
    schema="(Tensor(a!) out, Tensor(b!) key_pool, Tensor(c!) value_pool, Tensor query, Tensor key, "
    "Tensor value, Tensor positions, Tensor cos_sin_table, Tensor slot_mapping, "
    "Tensor? query_weight, Tensor? key_weight, float eps, float k_scale, float v_scale) -> ()",
    arguments=("pointer",) * 11 + ("int32",) * 6 + ("int64",) * 14 + ("float",) * 4,
    params={"scalar_t": list(DTYPES), "kv_t": _POOL_KINDS},
    bind=_rope_store_bind,
    geometry=_rope_store_geometry,
    cost=_rope_store_cost,
    reference=rope_store_reference,
    make_inputs=_rope_store_inputs,
    sizes=[
        {"tokens": 0, "heads": 2, "kv_heads": 1, "head_dim": 16},
        {"tokens": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "norm": 1},
        {"tokens": 5, "heads": 4, "kv_heads": 2, "head_dim": 128, "norm": 1, "unstored": 1},
        {"tokens": 3, "heads": 3, "kv_heads": 1, "head_dim": 80, "rotary_dim": 32, "gap": 8},
        {"tokens": 4, "heads": 5, "kv_heads": 5, "head_dim": 96, "norm": 1, "block_size": 4},
        {
            "tokens": 7,
            "heads": 2,
            "kv_heads": 3,
            "head_dim": 64,
            "rotary_dim": 16,
            "norm": 1,
            "block_size": 3,
        },
        {"tokens": 2, "heads": 6, "kv_heads": 1, "head_dim": 256, "norm": 1, "gap": 16},
        {"tokens": 1, "heads": 64, "kv_heads": 4, "head_dim": 128},
        {"tokens": 260, "heads": 9, "kv_heads": 2, "head_dim": 16, "norm": 1, "unstored": 2},
    ],
    bench_sizes=[
        {"tokens": tokens, "heads": 32, "kv_heads": 8, "head_dim": 128}
        for tokens in (1, 16, 128, 256, 1024, 8192)
    ],
    comes=_rope_store_comes,
    tolerance=1.0,  # of what rope_store_error allows each dtype
    error=rope_store_error,
    paper="https://arxiv.org/abs/2104.09864",
)
_COPY_BLOCKS = KernelSpec(
    name="copy_blocks",
    source="kv/copy_blocks.cu",
    entry="copy_blocks",
    schema="(Tensor(a!) pool, Tensor pairs) -> ()",
    arguments=("pointer",) * 2 + ("int64",) * 4,
    params={},
    bind=_copy_blocks_bind,
    geometry=_copy_blocks_geometry,
    cost=_copy_blocks_cost,
    reference=copy_blocks_reference,
    make_inputs=_copy_blocks_inputs,
    sizes=[
        {"pairs": 0, "pools": 2, "block_bytes": 64},
        {"pairs": 1, "pools": 1, "block_bytes": 16},
        {"pairs": 4, "pools": 3, "block_bytes": 4112, "gap": 8},
        {"pairs": 2, "pools": 2, "block_bytes": 16400},
        {"pairs": 3, "pools": 1, "block_bytes": 32768, "gap": 16},
    ],
    bench_sizes=[{"pairs": pairs, "pools": 32, "block_bytes": 65536} for pairs in (1, 16, 64)],
    tolerance=0.0,
    paper="https://arxiv.org/abs/2309.06180",
)
SPECS = [_ROPE_STORE, _COPY_BLOCKS]
define(SPECS)
