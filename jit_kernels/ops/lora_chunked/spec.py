"""The specs of the chunked LoRA kernels. Their grids fit any adapters of a step's tokens."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    in_outs,
    inputs,
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
from kiln.jit_kernels.ops.lora.cases import all_ranks, widest
from kiln.jit_kernels.ops.lora.reference import error_but_for_gaps
from kiln.jit_kernels.ops.lora.spec import MOST_PARTS
from kiln.jit_kernels.ops.lora_chunked import cases
from kiln.jit_kernels.ops.lora_chunked.chunks import LARGE, SMALL, num_chunks
from kiln.jit_kernels.ops.lora_chunked.reference import expand_reference, shrink_reference
from kiln.jit_kernels.torch_ops import define

_COLUMNS = {SMALL: 8, LARGE: 16}  # of h per block: kColumns in lora_chunked_shrink.cu
_MOST_WARPS = 16
_STEP = {2: 32, 4: 4}  # elements of a row that a warp takes at once, by bytes of an element
_STEPS_AHEAD = 4  # kAhead in lora_chunked_shrink.cu
_EXPAND_COLUMNS, _EXPAND_THREADS = 128, 128
_PARAMS = {"scalar_t": list(DTYPES), "chunk": [str(SMALL), str(LARGE)]}
_PAPER = "https://arxiv.org/abs/2310.18547"


def shrink_warps(input_size: int, itemsize: int) -> int:
    """Return the warps that share a sum; only this sets the order of its additions."""
    steps = -(-input_size // _STEP[itemsize])
    return min(max(-(-steps // _STEPS_AHEAD), 1), _MOST_WARPS)


def _supported(variant: Variant) -> bool:
    return dict(variant) != {"scalar_t": "float", "chunk": str(LARGE)}


def _variant(a: Arguments) -> Variant:
    chunk = a.sorted_token_ids.numel() // a.chunk_slots.numel()
    return {"scalar_t": SCALARS[a.adapter_pool.dtype], "chunk": str(chunk)}


def _chunks(variant: Variant, sizes: Sizes) -> int:
    return num_chunks(sizes["tokens"], sizes["slots"], int(variant["chunk"]))


def _table_bytes(variant: Variant, sizes: Sizes) -> int:
    return 4 * _chunks(variant, sizes) * (int(variant["chunk"]) + 1)


def _site_numbers(a: Arguments, tokens: int) -> dict[str, int]:
    """Return the arguments that both products of a site take."""
    parts, slots = a.rank_table.shape
    if parts > MOST_PARTS:
        raise ValueError(f"a LoRA site has at most {MOST_PARTS} parts; rank_table has {parts} rows")
    return {"tokens": tokens, "h_stride": a.h.stride(0), "num_parts": parts, "num_slots": slots}


def _shrink_bind(a: Arguments) -> Bound:
    tokens, input_size = a.x.shape
    numbers = _site_numbers(a, tokens)
    sizes = {"tokens": tokens, "input_size": input_size, "width": a.h.shape[1]}
    sizes["slots"] = numbers["num_slots"]
    numbers |= {"input_size": input_size, "x_stride": a.x.stride(0)}
    return Bound(_variant(a), sizes, numbers)


def _shrink_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    warps = shrink_warps(sizes["input_size"], DTYPES[variant["scalar_t"]].itemsize)
    columns = _COLUMNS[int(variant["chunk"])]
    grid = (_chunks(variant, sizes), -(-sizes["width"] // columns), 1)
    return LaunchGeometry(grid, (32 * warps, 1, 1))


def _shrink_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, size, columns = sizes["tokens"], sizes["input_size"], all_ranks(sizes["ranks"])
    weights = (tokens + columns) * size * DTYPES[variant["scalar_t"]].itemsize
    moved = weights + 4 * tokens * sizes["width"] + _table_bytes(variant, sizes)
    return Cost(moved, 2 * tokens * size * sizes["width"])


def _expand_bind(a: Arguments) -> Bound:
    tokens, outputs_ = a.out.shape
    site = _site_numbers(a, tokens)
    numbers = {"out_stride": a.out.stride(0), "outputs": outputs_, **site}
    sizes = {"tokens": tokens, "outputs": outputs_}
    sizes |= {"parts": site["num_parts"], "slots": site["num_slots"]}
    return Bound(_variant(a), sizes, numbers)


def _expand_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return blocks for all columns; a block has one part, so each part may need one more."""
    blocks = -(-sizes["outputs"] // _EXPAND_COLUMNS) + sizes["parts"] - 1
    return LaunchGeometry((_chunks(variant, sizes), blocks, 1), (_EXPAND_THREADS, 1, 1))


def _expand_cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, outputs_, ranks = sizes["tokens"], sizes["outputs"], sizes["ranks"]
    columns = all_ranks(ranks) // sizes["parts"]
    moved = (2 * tokens + columns) * outputs_ * DTYPES[variant["scalar_t"]].itemsize
    h = tokens * (widest(ranks) + sizes["gap"])
    small = 4 * (h + 2 * sizes["parts"]) + _table_bytes(variant, sizes)
    return Cost(moved + small, 2 * h * outputs_ // sizes["parts"])


LORA_CHUNKED_SHRINK = KernelSpec(
    name="lora_chunked_shrink",
    source="lora_chunked/lora_chunked_shrink.cu",
    entry="lora_chunked_shrink",
    parameters=declare(
        outputs("h"),
        inputs("x", "adapter_pool", "sorted_token_ids", "chunk_slots"),
        inputs("rank_table", "a_table"),
        derived("int64", "tokens", "x_stride", "h_stride"),
        derived("int32", "input_size", "num_parts", "num_slots"),
    ),
    params=_PARAMS,
    is_supported=_supported,
    bind=_shrink_bind,
    geometry=_shrink_geometry,
    cost=_shrink_cost,
    reference=shrink_reference,
    make_inputs=cases.shrink_inputs,
    sizes=cases.SHRINK_SIZES,
    bench_sizes=cases.SHRINK_BENCH_SIZES,
    bench_needs={"scalar_t": "kiln::bf16", "chunk": str(SMALL)},
    tolerance=1e-5,
    error=error_but_for_gaps,
    min_arch=80,
    max_cpu_seconds=0.4,
    paper=_PAPER,
)
LORA_CHUNKED_EXPAND = KernelSpec(
    name="lora_chunked_expand",
    source="lora_chunked/lora_chunked_expand.cu",
    entry="lora_chunked_expand",
    parameters=declare(
        in_outs("out"),
        inputs("h", "adapter_pool", "sorted_token_ids", "chunk_slots"),
        inputs("rank_table", "scale_table", "b_table"),
        derived("int64", "tokens", "out_stride", "h_stride"),
        values("int32", "end0", "end1"),
        derived("int32", "outputs", "num_parts", "num_slots"),
    ),
    params=_PARAMS,
    is_supported=_supported,
    bind=_expand_bind,
    geometry=_expand_geometry,
    cost=_expand_cost,
    reference=expand_reference,
    make_inputs=cases.expand_inputs,
    sizes=cases.EXPAND_SIZES,
    bench_sizes=cases.EXPAND_BENCH_SIZES,
    bench_needs={"scalar_t": "kiln::bf16", "chunk": str(SMALL)},
    # One rounding; Triton's interpreter rounds bf16 down, which doubles the error.
    tolerance={torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 8e-3},
    min_arch=80,
    max_cpu_seconds=0.4,
    paper=_PAPER,
)
SPECS = [LORA_CHUNKED_SHRINK, LORA_CHUNKED_EXPAND]
define(SPECS)
