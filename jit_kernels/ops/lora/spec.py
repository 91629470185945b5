"""The specs of the LoRA kernels. Their grids depend on the tokens and the site alone."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    in_outs,
    inputs,
    outputs,
    scratch,
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
from kiln.jit_kernels.ops.lora import cases
from kiln.jit_kernels.ops.lora.reference import (
    embedding_reference,
    error_but_for_gaps,
    expand_reference,
    shrink_error,
    shrink_reference,
)
from kiln.jit_kernels.ops.lora.split import (
    COLUMNS,
    spread_of,
    sums_at_once,
    threads_of,
    warps_of_slice,
)
from kiln.jit_kernels.ops.lora.tiles import num_elements
from kiln.jit_kernels.torch_ops import define

MOST_PARTS = 3  # of a site: kMostParts in parts.cuh
WARP_COLUMNS = 64  # of out in a warp of lora_expand: kWarpColumns in expand_fma.cuh
_EXPAND_WARPS = 4
_PAPER = "https://arxiv.org/abs/2310.18547"


def _site_numbers(a: Arguments) -> dict[str, int]:
    """Return the arguments that both products of a site take."""
    parts, slots = a.rank_table.shape
    if parts > MOST_PARTS:
        raise ValueError(f"a LoRA site has at most {MOST_PARTS} parts; rank_table has {parts} rows")
    return {
        "h_stride": a.h.stride(0),
        "num_parts": parts,
        "num_slots": slots,
        "tile": a.tile_tokens.shape[1],
    }


def _tile_sizes(a: Arguments) -> Sizes:
    tiles, tile = a.tile_tokens.shape
    return {"tiles": tiles, "tile": tile}


def _shrink_bind(a: Arguments) -> Bound:
    input_size = a.x.shape[1]
    sizes = {"input_size": input_size, "width": a.h.shape[1], **_tile_sizes(a)}
    numbers = {
        "input_size": input_size,
        "x_stride": a.x.stride(0),
        "warps": warps_of_slice(input_size),
        "spread": spread_of(sizes["tile"]),
        **_site_numbers(a),
    }
    return Bound({"scalar_t": SCALARS[a.adapter_pool.dtype]}, sizes, numbers)


def _shrink_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    size, tile = sizes["input_size"], sizes["tile"]
    shared = sums_at_once(size, tile) * tile * COLUMNS * 4
    grid = (-(-sizes["width"] // COLUMNS) * spread_of(tile), sizes["tiles"], 1)
    return LaunchGeometry(grid, (threads_of(size, tile), 1, 1), shared)


def _shrink_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, size, columns = sizes["tokens"], sizes["input_size"], cases.all_ranks(sizes["ranks"])
    weights = (tokens + columns) * size * DTYPES[variant["scalar_t"]].itemsize
    tiles = num_elements(tokens, cases.slots_of(sizes))
    return Cost(
        weights + 4 * tokens * sizes["width"] + 4 * tiles, 2 * tokens * size * sizes["width"]
    )


def _expand_bind(a: Arguments) -> Bound:
    sizes = {"outputs": a.out.shape[1], "parts": a.rank_table.shape[0], **_tile_sizes(a)}
    numbers = {"out_stride": a.out.stride(0), "outputs": a.out.shape[1], **_site_numbers(a)}
    return Bound({"scalar_t": SCALARS[a.adapter_pool.dtype]}, sizes, numbers)


def _expand_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return blocks for all columns; a block has one part, so each part may need one more."""
    blocks = -(-sizes["outputs"] // (_EXPAND_WARPS * WARP_COLUMNS)) + sizes["parts"] - 1
    return LaunchGeometry((blocks, sizes["tiles"], 1), (32 * _EXPAND_WARPS, 1, 1))


def _expand_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, outputs_, ranks = sizes["tokens"], sizes["outputs"], sizes["ranks"]
    columns = cases.all_ranks(ranks) // sizes["parts"]
    moved = (2 * tokens + columns) * outputs_ * DTYPES[variant["scalar_t"]].itemsize
    h = tokens * (cases.widest(ranks) + sizes["gap"])
    small = num_elements(tokens, cases.slots_of(sizes)) + 2 * sizes["parts"]
    return Cost(moved + 4 * (h + small), 2 * h * outputs_ // sizes["parts"])


def _embedding_bind(a: Arguments) -> Bound:
    variant = {"scalar_t": SCALARS[a.adapter_pool.dtype]}
    return Bound(variant, _tile_sizes(a), {"h_stride": a.h.stride(0)})


def _embedding_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((sizes["tiles"], 1, 1), (32 * sizes["tile"], 1, 1))


def _embedding_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens = sizes["tokens"]
    elements = tokens * (cases.widest(sizes["ranks"]) + sizes["gap"])
    itemsize = DTYPES[variant["scalar_t"]].itemsize
    tiles = num_elements(tokens, cases.slots_of(sizes))
    return Cost((itemsize + 4) * elements + 8 * tokens + 4 * tiles, 0)


LORA_SHRINK = KernelSpec(
    name="lora_shrink",
    source="lora/lora_shrink.cu",
    entry="lora_shrink",
    parameters=declare(
        outputs("h"),
        inputs("x", "adapter_pool", "tile_slots", "tile_tokens", "rank_table", "a_table"),
        scratch("partials", "arrivals"),
        derived("int64", "input_size", "x_stride", "h_stride"),
        derived("int32", "num_parts", "num_slots", "tile", "warps", "spread"),
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_shrink_bind,
    geometry=_shrink_geometry,
    cost=_shrink_cost,
    reference=shrink_reference,
    make_inputs=cases.shrink_inputs,
    sizes=cases.TILED_SHRINK_SIZES,
    bench_sizes=cases.SHRINK_BENCH_SIZES,
    tolerance=1e-5,
    error=shrink_error,
    min_arch=80,
    max_cpu_seconds=0.4,
    paper=_PAPER,
)
LORA_EXPAND = KernelSpec(
    name="lora_expand",
    source="lora/lora_expand.cu",
    entry="lora_expand",
    parameters=declare(
        in_outs("out"),
        inputs("h", "adapter_pool", "tile_slots", "tile_tokens"),
        inputs("rank_table", "scale_table", "b_table"),
        derived("int64", "out_stride", "h_stride"),
        values("int32", "end0", "end1"),
        derived("int32", "outputs", "num_parts", "num_slots", "tile"),
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_expand_bind,
    geometry=_expand_geometry,
    cost=_expand_cost,
    reference=expand_reference,
    make_inputs=cases.expand_inputs,
    sizes=cases.TILED_EXPAND_SIZES,
    bench_sizes=cases.EXPAND_BENCH_SIZES,
    # One rounding; Triton's interpreter rounds bf16 down, which doubles the error.
    tolerance={torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 8e-3},
    min_arch=80,
    max_cpu_seconds=0.3,
    paper=_PAPER,
)
LORA_SHRINK_EMBEDDING = KernelSpec(
    name="lora_shrink_embedding",
    source="lora/lora_shrink_embedding.cu",
    entry="lora_shrink_embedding",
    parameters=declare(
        outputs("h"),
        inputs("token_ids", "adapter_pool", "tile_slots", "tile_tokens", "rank_table", "a_table"),
        derived("int64", "h_stride"),
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_embedding_bind,
    geometry=_embedding_geometry,
    cost=_embedding_cost,
    reference=embedding_reference,
    make_inputs=cases.embedding_inputs,
    sizes=cases.EMBEDDING_SIZES,
    bench_sizes=cases.EMBEDDING_BENCH_SIZES,
    tolerance=0.0,
    error=error_but_for_gaps,
    paper=_PAPER,
)
SPECS = [LORA_SHRINK, LORA_EXPAND, LORA_SHRINK_EMBEDDING]
define(SPECS)
