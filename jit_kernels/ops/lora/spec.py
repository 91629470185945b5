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
    shrink_reference,
)
from kiln.jit_kernels.torch_ops import define

COLUMNS = 4  # of h per block: kColumns in lora_shrink.cu
TILE = 4  # tokens per block, of steps with prompts: kRunTokens in runs.cuh
_MOST_ROWS = 256  # steps of more tokens have prompts, whose tokens have one adapter
_MOST_THREADS = 512
_EXPAND_THREADS, _EMBEDDING_THREADS = 128, 64
_PAPER = "https://arxiv.org/abs/2310.18547"


def shrink_threads(input_size: int, itemsize: int) -> int:
    """Return the threads that share a sum; only this sets the order of its additions.

    About two vectors of 16 bytes for each thread.
    """
    vectors = -(-input_size * itemsize // 16)
    return min(max(-(-vectors // 64) * 32, 32), _MOST_THREADS)


def tile_of(tokens: int) -> int:
    """Return the tokens of a block; the bits of none of them depend on it."""
    return TILE if tokens > _MOST_ROWS else 1


def expand_columns(itemsize: int) -> int:
    """Return the columns of out that a block of lora_expand adds to."""
    return _EXPAND_THREADS * (16 // itemsize)


def _site_numbers(a: Arguments, tokens: int) -> dict[str, int]:
    """Return the arguments that both products of a site take."""
    return {
        "h_stride": a.h.stride(0),
        "num_parts": a.rows.numel(),
        "num_slots": a.rank_table.shape[1],
        "tile": tile_of(tokens),
        "tokens": tokens,
    }


def _shrink_bind(a: Arguments) -> Bound:
    tokens, input_size = a.x.shape
    sizes = {"tokens": tokens, "input_size": input_size, "width": a.h.shape[1]}
    numbers = {
        "input_size": input_size,
        "x_stride": a.x.stride(0),
        **_site_numbers(a, tokens),
    }
    return Bound({"scalar_t": SCALARS[a.adapter_pool.dtype]}, sizes, numbers)


def _shrink_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    threads = shrink_threads(sizes["input_size"], DTYPES[variant["scalar_t"]].itemsize)
    tiles = -(-sizes["tokens"] // tile_of(sizes["tokens"]))
    return LaunchGeometry((tiles, -(-sizes["width"] // COLUMNS), 1), (threads, 1, 1))


def _shrink_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, size, columns = sizes["tokens"], sizes["input_size"], cases.all_ranks(sizes["ranks"])
    weights = (tokens + columns) * size * DTYPES[variant["scalar_t"]].itemsize
    return Cost(
        weights + 4 * tokens * (sizes["width"] + 1) + 12, 2 * tokens * size * sizes["width"]
    )


def _expand_bind(a: Arguments) -> Bound:
    tokens, outputs_ = a.out.shape
    sizes = {"tokens": tokens, "outputs": outputs_, "parts": a.rows.numel()}
    numbers = {"out_stride": a.out.stride(0), **_site_numbers(a, tokens)}
    return Bound({"scalar_t": SCALARS[a.adapter_pool.dtype]}, sizes, numbers)


def _expand_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return blocks for all columns; a block has one part, so each part may need one more."""
    columns = expand_columns(DTYPES[variant["scalar_t"]].itemsize)
    blocks = -(-sizes["outputs"] // columns) + sizes["parts"] - 1
    tiles = -(-sizes["tokens"] // tile_of(sizes["tokens"]))
    return LaunchGeometry((tiles, blocks, 1), (_EXPAND_THREADS, 1, 1))


def _expand_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, outputs_, ranks = sizes["tokens"], sizes["outputs"], sizes["ranks"]
    columns = cases.all_ranks(ranks) // sizes["parts"]
    moved = (2 * tokens + columns) * outputs_ * DTYPES[variant["scalar_t"]].itemsize
    h = tokens * (cases.widest(ranks) + sizes["gap"])
    small = tokens + 2 * sizes["parts"] + 1
    return Cost(moved + 4 * (h + small), 2 * h * outputs_ // sizes["parts"])


def _embedding_bind(a: Arguments) -> Bound:
    numbers = {"h_stride": a.h.stride(0), "num_slots": a.rank_table.shape[1]}
    sizes = {"tokens": a.token_ids.numel()}
    return Bound({"scalar_t": SCALARS[a.adapter_pool.dtype]}, sizes, numbers)


def _embedding_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((sizes["tokens"], 1, 1), (_EMBEDDING_THREADS, 1, 1))


def _embedding_cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["tokens"] * (cases.widest(sizes["ranks"]) + sizes["gap"])
    itemsize = DTYPES[variant["scalar_t"]].itemsize
    return Cost((itemsize + 4) * elements + 12 * sizes["tokens"] + 4, 0)


LORA_SHRINK = KernelSpec(
    name="lora_shrink",
    source="lora/lora_shrink.cu",
    entry="lora_shrink",
    parameters=declare(
        outputs("h"),
        inputs("x", "adapter_pool", "token_slots", "rows", "rank_table", "a_table"),
        derived("int64", "tokens", "input_size", "x_stride", "h_stride"),
        derived("int32", "num_parts", "num_slots", "tile"),
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_shrink_bind,
    geometry=_shrink_geometry,
    cost=_shrink_cost,
    reference=shrink_reference,
    make_inputs=cases.shrink_inputs,
    sizes=cases.SHRINK_SIZES,
    bench_sizes=cases.SHRINK_BENCH_SIZES,
    tolerance=1e-5,
    error=error_but_for_gaps,
    max_cpu_seconds=0.4,
    paper=_PAPER,
)
LORA_EXPAND = KernelSpec(
    name="lora_expand",
    source="lora/lora_expand.cu",
    entry="lora_expand",
    parameters=declare(
        in_outs("out"),
        inputs("h", "adapter_pool", "token_slots", "rows", "part_starts"),
        inputs("rank_table", "scale_table", "b_table"),
        derived("int64", "tokens", "out_stride", "h_stride"),
        derived("int32", "num_parts", "num_slots", "tile"),
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_expand_bind,
    geometry=_expand_geometry,
    cost=_expand_cost,
    reference=expand_reference,
    make_inputs=cases.expand_inputs,
    sizes=cases.EXPAND_SIZES,
    bench_sizes=cases.EXPAND_BENCH_SIZES,
    # One rounding; Triton's interpreter rounds bf16 down, which doubles the error.
    tolerance={torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 8e-3},
    max_cpu_seconds=0.3,
    paper=_PAPER,
)
LORA_SHRINK_EMBEDDING = KernelSpec(
    name="lora_shrink_embedding",
    source="lora/lora_shrink_embedding.cu",
    entry="lora_shrink_embedding",
    parameters=declare(
        outputs("h"),
        inputs("token_ids", "adapter_pool", "token_slots", "rows", "rank_table", "a_table"),
        derived("int64", "h_stride"),
        derived("int32", "num_slots"),
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
