"""The spec of the product of a few rows."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
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
from kiln.jit_kernels.ops.linear import cases
from kiln.jit_kernels.ops.linear.reference import BLOCK, skinny_gemm_reference
from kiln.jit_kernels.torch_ops import define

MOST_TILES = 2
MOST_ROWS = MOST_TILES * cases.MOST_ROWS
_OUTPUTS, _THREADS = 16, 512  # of a block
_ALIGNED = 16  # bytes
_CODE = torch.float8_e4m3fn


def _format_of(tensor: torch.Tensor) -> str:
    return "E4M3" if tensor.dtype == _CODE else "Plain"


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row can be loaded in vectors, up to its end."""
    start = (tensor.storage_offset() if tensor.is_meta else tensor.data_ptr()) % _ALIGNED
    sizes = (tensor.shape[1], tensor.stride(0)) if len(tensor) > 1 else tensor.shape[1:]
    return not start and not any(size * tensor.itemsize % _ALIGNED for size in sizes)


def _scaled(a: Arguments) -> str:
    if a.scales is None:
        return "kNone"
    return "kByOutput" if a.scales.shape[1] == 1 else "kByBlock"


def why_not(a: Arguments) -> str:
    """Return why the kernel cannot multiply; an empty text if it can."""
    rows, size = a.x.shape
    if not 1 <= rows <= MOST_ROWS or not size:
        return f"x is {rows} x {size}; want 1 to {MOST_ROWS} rows"
    if a.weight.shape[1] != size or a.out.shape != (rows, len(a.weight)):
        shapes = {name: list(getattr(a, name).shape) for name in ("x", "weight", "out")}
        return f"shapes that do not fit each other: {shapes}"
    if any(one.stride(1) != 1 for one in (a.x, a.weight, a.out)):
        return "elements of a row are not side by side"
    return _why_no_codes(a, size)


def _why_no_codes(a: Arguments, size: int) -> str:
    """Return what is wrong with dtypes, codes and scales; an empty text if nothing is."""
    coded = {name: t for name, t in (("x", a.x), ("weight", a.weight)) if t.dtype == _CODE}
    scaled = {"x": a.x_scales is not None, "weight": a.scales is not None}
    floats = {t.dtype for t in (a.x, a.weight) if t.dtype != _CODE} - {a.out.dtype}
    if floats:
        return f"{floats.pop()} beside out of {a.out.dtype}"
    if any(scaled[name] != (name in coded) for name in scaled) or (coded and "weight" not in coded):
        return f"codes in {list(coded)} and scales of {[name for name in scaled if scaled[name]]}"
    if not coded:
        return ""
    step = BLOCK if a.scales.shape[1] > 1 else BLOCK // 2
    if size % step:
        return f"codes in rows of {size}; want a multiple of {step}"
    if not a.scales.is_contiguous():
        return "scales are not contiguous"
    for name, tensor in coded.items():
        if not _is_aligned(tensor):
            return f"rows of codes of {name} do not begin at multiples of {_ALIGNED} bytes"
    return ""


def _bind(a: Arguments) -> Bound:
    if problem := why_not(a):
        raise ValueError(f"skinny_gemm: {problem}")
    (rows, size), outputs_ = a.x.shape, len(a.weight)
    variant = {
        "scalar_t": SCALARS[a.out.dtype],
        "weight": _format_of(a.weight),
        "input": _format_of(a.x),
        "scaled": _scaled(a),
        "tiles": str(-(-rows // cases.MOST_ROWS)),
    }
    by_row = a.scales is None or len(a.scales) == outputs_
    numbers = {
        "x_stride": a.x.stride(0),
        "weight_stride": a.weight.stride(0),
        "out_stride": a.out.stride(0),
        "x_scale_row": 0 if a.x_scales is None else a.x_scales.stride(0),
        "x_scale_column": 0 if a.x_scales is None else a.x_scales.stride(1),
        "rows": rows,
        "outputs": outputs_,
        "inputs": size,
        "scale_columns": 0 if a.scales is None else a.scales.shape[1],
        "outputs_log2": 0 if by_row else BLOCK.bit_length() - 1,
        "aligned": int(_is_aligned(a.x) and _is_aligned(a.weight)),
    }
    return Bound(variant, {"outputs": outputs_}, numbers)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((-(-sizes["outputs"] // _OUTPUTS), 1, 1), (_THREADS, 1, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    (rows, size), outputs_ = cases.shape_of_x(variant, sizes), sizes["outputs"]
    item, of_bias = DTYPES[variant["scalar_t"]].itemsize, outputs_ if sizes.get("bias") else 0
    weights = outputs_ * size * (1 if variant["weight"] == "E4M3" else item)
    of_x = rows * size * (1 if variant["input"] == "E4M3" else item)
    scales = 0
    if variant["scaled"] != "kNone":
        blocks = variant["scaled"] == "kByBlock"
        by_row = not blocks or sizes.get("by_row")
        columns = size // BLOCK if blocks else 1
        scales = (outputs_ if by_row else -(-outputs_ // BLOCK)) * (columns + blocks)
        scales += rows * columns if variant["input"] == "E4M3" else 0
    moved = weights + of_x + (rows * outputs_ + of_bias) * item + 4 * scales
    return Cost(moved, 2 * rows * outputs_ * size)


def _is_supported(variant: Variant) -> bool:
    """Codes have scales, and codes of x are multiplied by codes alone."""
    is_coded = variant["weight"] == "E4M3"
    if is_coded == (variant["scaled"] == "kNone"):
        return False
    return is_coded or variant["input"] == "Plain"


def _is_possible(some: Variant) -> bool:
    """Whether a call has these values: codes have scales, whatever other layers of a model have."""
    return not {"weight", "input", "scaled"} <= some.keys() or _is_supported(some)


SKINNY_GEMM = KernelSpec(
    name="skinny_gemm",
    source="linear/skinny_gemm.cu",
    entry="skinny_gemm",
    parameters=declare(
        outputs("out"),
        inputs("x", "weight"),
        optional("x_scales", "scales", "bias"),
        derived("int64", "x_stride", "weight_stride", "out_stride"),
        derived("int64", "x_scale_row", "x_scale_column"),
        derived("int32", "rows", "outputs", "inputs", "scale_columns", "outputs_log2", "aligned"),
    ),
    params={
        "scalar_t": [SCALARS[torch.bfloat16], SCALARS[torch.float16]],
        "weight": ["Plain", "E4M3"],
        "input": ["Plain", "E4M3"],
        "scaled": ["kNone", "kByOutput", "kByBlock"],
        "tiles": [str(one + 1) for one in range(MOST_TILES)],
    },
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=skinny_gemm_reference,
    make_inputs=cases.skinny_gemm_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance={torch.float16: 6e-4, torch.bfloat16: 4e-3},
    is_supported=_is_supported,
    is_possible=_is_possible,
    min_arch=80,
    bench_needs={"scalar_t": "kiln::bf16", "tiles": "1"},
    paper="https://arxiv.org/abs/2408.11743",  # weights as the left operand of mma
)
SPECS = [SKINNY_GEMM]
define(SPECS)
