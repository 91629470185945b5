"""The spec of the product of many rows with quantised weights."""

from __future__ import annotations

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
from kiln.jit_kernels.ops.quantized_linear.cases import FEW_ROWS, MANY_ROWS
from kiln.jit_kernels.ops.quantized_linear.reference import (
    error_but_for_rows_behind,
    quantized_gemm_reference,
)
from kiln.jit_kernels.ops.shared.four_bits import CHUNK
from kiln.jit_kernels.torch_ops import define

OUTPUTS, CLUSTER = 128, 4  # of a block; blocks
_THREADS = 128
_ALIGNED = 16  # bytes
_GROUPS = (32, 64, 128)
_FINE_GROUP = 32  # of e2m1
_ENOUGH_BLOCKS = 128  # for a GPU: more slices would not make a product of few rows faster
_MANY_BLOCKS = 256  # without slices: a block for each slice would not make a product faster
_MOST_INPUTS = 2**24
_FEWEST_CHUNKS = 4  # of a slice
_MOST_GRID_Y = 65535
_TILE_BYTES = OUTPUTS * CHUNK // 2  # of codes
_PITCH = OUTPUTS + 4
_LARGE = 200 * 1024  # shared memory of a GPU that has room for two large blocks in an SM


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


def _is_aligned(tensor: torch.Tensor, size: int = _ALIGNED) -> bool:
    """Whether every row begins at a multiple of ``size`` bytes."""
    start = (tensor.storage_offset() if tensor.is_meta else tensor.data_ptr()) % size
    return not start and (len(tensor) < 2 or not tensor.stride(0) * tensor.itemsize % size)


def _group_of(a: Arguments) -> int:
    """Return how many inputs share a scale; 0: all of an output."""
    columns: int = a.scales.shape[-1]
    return 0 if columns == 1 and a.scales.dtype != torch.uint8 else _padded(a) // max(columns, 1)


def _padded(a: Arguments) -> int:
    return cases.padded(a.x.shape[1])


def variant_of(a: Arguments) -> Variant:
    """Return the variant that multiplies."""
    return {
        "scalar_t": SCALARS[a.out.dtype],
        "weight": "E2M1" if a.scales.dtype == torch.uint8 else "U4",
        "group": str(_group_of(a)),
        "tile_rows": str(a.tile_rows),
    }


def why_not(a: Arguments) -> str:
    """Return why the kernel cannot multiply; an empty text if it can."""
    rows, size = a.x.shape
    if rows < 1 or not 1 <= size <= _MOST_INPUTS or size % 8:
        return f"x is {rows} x {size}; want rows of a multiple of 8, up to {_MOST_INPUTS}"
    if a.tile_rows not in (FEW_ROWS, MANY_ROWS):
        return f"tile_rows is {a.tile_rows}; want {FEW_ROWS} or {MANY_ROWS}"
    if a.out.dtype not in (torch.bfloat16, torch.float16) or a.x.dtype != a.out.dtype:
        return f"x of {a.x.dtype} and out of {a.out.dtype}; want bf16 or fp16"
    if a.x.stride(1) != 1 or a.out.stride(1) != 1:
        return "elements of a row are not side by side"
    if not _is_aligned(a.x):
        return f"rows of x do not begin at multiples of {_ALIGNED} bytes"
    return _why_no_weights(a) or _why_no_options(a)


def _why_no_weights(a: Arguments) -> str:
    """Return what is wrong with codes and scales; an empty text if nothing is."""
    lead = list(a.codes.shape[:-1])
    is_wrong = a.codes.shape[-1] != _padded(a) // 2 or list(a.scales.shape[:-1]) != lead
    if is_wrong or len(lead) != (1 if a.ends is None else 2):
        shapes = {name: list(getattr(a, name).shape) for name in ("x", "codes", "scales")}
        return f"shapes that do not fit each other: {shapes}"
    if list(a.out.shape) != [len(a.x), lead[-1]]:
        return f"out is {list(a.out.shape)}; want {[len(a.x), lead[-1]]}"
    kinds = (a.codes.dtype, a.scales.dtype)
    if kinds[0] != torch.uint8 or kinds[1] not in (torch.uint8, torch.float32):
        return f"codes of {kinds[0]} and scales of {kinds[1]}; want uint8, and float32 or uint8"
    columns, group = a.scales.shape[-1], _group_of(a)
    known = (_FINE_GROUP,) if kinds[1] == torch.uint8 else (*_GROUPS, 0)
    if group not in known or (group and columns * group != _padded(a)):
        return (
            f"{columns} scales of {_padded(a)} padded inputs; want one of each {known}, 0 for all"
        )
    return ""


def _why_no_options(a: Arguments) -> str:
    """Return what is wrong with zeros, bias and ends, or how memory lies."""
    if a.zeros is not None and a.scales.dtype == torch.uint8:
        return "zero points beside scales of uint8"
    if a.bias is not None and a.ends is not None:
        return "a bias beside experts"
    experts = a.codes.shape[:-2]
    for name, shape, dtype in (
        ("zeros", a.scales.shape, torch.int16),
        ("bias", a.codes.shape[-2:-1], a.out.dtype),
        ("ends", experts, torch.int32),
    ):
        given = getattr(a, name)
        if given is not None and (given.shape != shape or given.dtype != dtype):
            return f"{name} is {list(given.shape)} of {given.dtype}; want {list(shape)} of {dtype}"
    for name in ("codes", "scales", "zeros", "bias", "ends"):
        given = getattr(a, name)
        if given is not None and not given.is_contiguous():
            return f"{name} is not contiguous"
    for name in ("codes", "scales", "zeros"):
        given = getattr(a, name)
        if given is not None and not _is_aligned(given.view(-1)[:1]):
            return f"{name} does not begin at a multiple of {_ALIGNED} bytes"
    return ""


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
        "aligned": int(_is_aligned(a.out, 4 * a.out.itemsize)),
    }
    return Bound(variant, sizes, numbers)


def _shared_bytes(variant: Variant, gpu: Gpu) -> int:
    """Return the size of the ring of tiles (kStages in the template) and of the sums."""
    rows = int(variant["tile_rows"])
    stages = 4 if rows == FEW_ROWS else 3 if gpu.max_shared_bytes > _LARGE else 2
    return stages * (_TILE_BYTES + rows * CHUNK * 2) + rows * _PITCH * 4


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
    weights = max(experts, 1) * outputs_
    columns = cases.columns_of(variant, size)
    is_float = variant["weight"] == "U4"
    scales = columns * (4 + 2 * bool(sizes.get("zeros")) if is_float else 1)
    of_bias = outputs_ if sizes.get("bias") else 0
    moved = weights * (cases.padded(size) // 2 + scales) + 4 * experts
    moved += (rows * (size + outputs_) + of_bias) * item
    return Cost(moved, 2 * rows * outputs_ * size)


def _is_supported(variant: Variant) -> bool:
    return variant["weight"] == "U4" or variant["group"] == str(_FINE_GROUP)


def _is_possible(some: Variant) -> bool:
    """Whether a call has these values: other layers of a model may have weights of other kinds."""
    kind = some.get("weight", "U4")
    return kind in ("U4", "E2M1") and _is_supported(
        {"group": str(_FINE_GROUP), **some, "weight": kind}
    )


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
        operator_only("int32", "tile_rows"),
    ),
    params={
        "scalar_t": [SCALARS[torch.bfloat16], SCALARS[torch.float16]],
        "weight": ["U4", "E2M1"],
        "group": [str(group) for group in (*_GROUPS, 0)],
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
