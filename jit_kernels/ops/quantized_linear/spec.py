"""The spec of the product of many rows with quantised weights."""

from __future__ import annotations

from types import MappingProxyType

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
    operator_only,
    optional,
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
from kiln.jit_kernels.ops.quantized_linear import cases
from kiln.jit_kernels.ops.quantized_linear.cases import BITS, FEW_ROWS, MANY_ROWS
from kiln.jit_kernels.ops.quantized_linear.checks import (
    FINE_GROUP,
    GROUPS,
    code_stride,
    is_aligned,
    outputs_log2,
    variant_of,
    why_not,
)
from kiln.jit_kernels.ops.quantized_linear.reference import (
    BLOCK,
    error_but_for_rows_behind,
    quantized_gemm_reference,
)
from kiln.jit_kernels.ops.shared.four_bits import CHUNK
from kiln.jit_kernels.torch_ops import define

OUTPUTS, CLUSTER = 128, 4  # of a block; blocks
_THREADS = 128
_ENOUGH_BLOCKS = 128  # for a GPU: more slices would not make a product of few rows faster
_MANY_BLOCKS = 256  # without slices: a block for each slice would not make a product faster
_FEWEST_CHUNKS = 4  # of a slice
_MOST_GRID_Y = 65535
_PITCH = OUTPUTS + 4
# Shared memory of a GPU that has room for two large blocks in an SM, or for two middle ones.
_LARGE, _MIDDLE = 200 * 1024, 100 * 1024


def slices_of(outputs_: int, size: int) -> int:
    """Return into how many slices the inputs are cut; only this sets the order of a sum.

    It must not depend on the rows, as their bits would then depend on each other.
    """
    tiles, chunks, slices = -(-outputs_ // OUTPUTS), -(-size // CHUNK), 1
    while slices < CLUSTER and tiles * slices < _ENOUGH_BLOCKS:
        if chunks < 2 * slices * _FEWEST_CHUNKS:
            break
        slices *= 2
    return slices


def tile_rows_for(rows: int, experts: int) -> int:
    """Return the rows of a block that suit a product; no bit of the result depends on them."""
    return FEW_ROWS if rows <= FEW_ROWS * max(experts, 1) else MANY_ROWS


def _most_runs(variant: Variant, sizes: Sizes) -> int:
    """Return the largest number of row blocks; rows of several experts share none."""
    rows = sizes["rows"]
    return -(-rows // int(variant["tile_rows"])) + min(sizes["experts"], rows)


def _split(variant: Variant, sizes: Sizes) -> int:
    """Return how many blocks share the slices of a tile: one, if there are enough tiles."""
    tiles = -(-sizes["outputs"] // OUTPUTS)
    slices = slices_of(sizes["outputs"], sizes["inputs"])
    return slices if tiles * _most_runs(variant, sizes) < _MANY_BLOCKS else 1


def _bind(a: Arguments) -> Bound:
    if problem := why_not(a):
        raise ValueError(f"quantized_gemm: {problem}")
    (rows, size), outputs_ = a.x.shape, a.codes.shape[-2]
    experts = 0 if a.ends is None else len(a.codes)
    variant = variant_of(a)
    sizes = {"rows": rows, "outputs": outputs_, "inputs": size, "experts": experts}
    numbers = {
        "x_stride": a.x.stride(0),
        "out_stride": a.out.stride(0),
        **sizes,
        "slices_log2": slices_of(outputs_, size).bit_length() - 1,
        "split": _split(variant, sizes),
        "aligned": int(is_aligned(a.out, 4 * a.out.itemsize)),
        "code_stride": code_stride(a.codes),
        "scale_columns": a.scales.shape[-1],
        "outputs_log2": outputs_log2(a),
    }
    return Bound(variant, sizes, numbers)


def _shared_bytes(variant: Variant, gpu: Gpu) -> int:
    """Return the size of the ring of tiles (kStages in the template) and of the sums."""
    rows, bits = int(variant["tile_rows"]), BITS[variant["weight"]]
    is_few, is_large = rows == FEW_ROWS, gpu.max_shared_bytes > _LARGE
    stages = 4 if is_few else 3 if is_large else 2
    if bits == 8:
        is_middle = not is_large and gpu.max_shared_bytes > _MIDDLE
        stages = 3 if is_few != is_middle else 2
    tile = OUTPUTS * CHUNK * bits // 8 + rows * CHUNK * 2
    return stages * tile + rows * _PITCH * 4


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return blocks for all tiles. With experts, blocks take turns: few know how many rows."""
    blocks = -(-sizes["outputs"] // OUTPUTS) * _split(variant, sizes)
    runs = min(_most_runs(variant, sizes), _MOST_GRID_Y)
    if sizes["experts"]:
        runs = min(runs, -(-2 * gpu.num_multiprocessors // blocks))
    grid = (-(-blocks // CLUSTER) * CLUSTER, runs, 1)
    return LaunchGeometry(grid, (_THREADS, 1, 1), _shared_bytes(variant, gpu))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    rows, size, outputs_ = sizes["rows"], sizes["inputs"], sizes["outputs"]
    item, experts = DTYPES[variant["scalar_t"]].itemsize, sizes["experts"]
    scale_rows, columns = cases.shape_of_scales(variant, sizes)
    zeros = variant["weight"] == "U4" and sizes.get("zeros", 0)
    scales = scale_rows * columns * (1 if variant["weight"] == "E2M1" else 4 + 2 * bool(zeros))
    of_bias = outputs_ if sizes.get("bias") else 0
    width = size if BITS[variant["weight"]] == 8 else cases.padded(size) // 2
    moved = max(experts, 1) * (outputs_ * width + scales) + 4 * experts
    moved += (rows * (size + outputs_) + of_bias) * item
    return Cost(moved, 2 * rows * outputs_ * size)


# Inputs that share a scale, 0: all, by format.
_KINDS = MappingProxyType(
    {
        "U4": tuple(str(group) for group in (*GROUPS, 0)),
        "E2M1": (str(FINE_GROUP),),
        "E4M3": (str(BLOCK), "0"),
        "I8": ("0",),
    }
)


def _is_supported(variant: Variant) -> bool:
    return variant["group"] in _KINDS[variant["weight"]]


def _is_possible(some: Variant) -> bool:
    """Whether a call has these values: other layers of a model may have weights of other kinds."""
    groups = _KINDS.get(some.get("weight", "U4"), ())
    return some["group"] in groups if "group" in some else bool(groups)


QUANTIZED_GEMM = KernelSpec(
    name="quantized_gemm",
    source="quantized_linear/quantized_gemm.cu",
    entry="quantized_gemm",
    parameters=declare(
        outputs("out"),
        inputs("x", "codes", "scales"),
        optional("zeros", "bias", "ends"),
        derived("int64", "x_stride", "out_stride"),
        derived("int32", "rows", "outputs", "inputs", "experts", "slices_log2", "split", "aligned"),
        derived("int32", "code_stride", "scale_columns", "outputs_log2"),
        operator_only("int32", "tile_rows"),
    ),
    params={
        "scalar_t": [SCALARS[torch.bfloat16], SCALARS[torch.float16]],
        "weight": list(_KINDS),
        "group": list(_KINDS["U4"]),
        "tile_rows": [str(FEW_ROWS), str(MANY_ROWS)],
    },
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=quantized_gemm_reference,
    make_inputs=cases.quantized_gemm_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance={torch.float16: 6e-4, torch.bfloat16: 4e-3},
    error=error_but_for_rows_behind,
    is_supported=_is_supported,
    is_possible=_is_possible,
    min_arch=80,
    max_cpu_seconds=0.5,
    shared_bytes=_shared_bytes,
    bench_needs={
        "scalar_t": "kiln::bf16",
        "weight": "U4",
        "group": "128",
        "tile_rows": str(MANY_ROWS),
    },
    paper="https://arxiv.org/abs/2408.11743",  # codes that are widened beside tensor cores
)
SPECS = [QUANTIZED_GEMM]
define(SPECS)
