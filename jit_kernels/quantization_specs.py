"""The kernels behind jit_kernels/ops/quantization.py, declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kiln.jit_kernels.ops.norm.reference import normalise
from kiln.jit_kernels.parity import largest_error
from kiln.jit_kernels.references.quantized import (
    QUANTS,
    code_bytes,
    code_error,
    code_inputs,
    quantised,
    scale_strides,
    scales_of,
)
from kiln.jit_kernels.row_geometry import doubled_row_geometry, row_geometry
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

_PAPER = "https://arxiv.org/abs/2209.05433"  # the format; scales: https://arxiv.org/abs/2412.19437
_PARTS_THREADS = 512
_TEST_MAXIMA = 200
_OUTPUTS = "Tensor(a!) out, Tensor(b!) out_scale"
_NUMBERS = "int group_size, float eps, float weight_offset"
_PARAMS = {"scalar_t": list(DTYPES), "quant_t": list(QUANTS.values())}
_TOLERANCE = 1.01  # of what rounding to the dtype and to a code may leave
Results = tuple[torch.Tensor, ...]
Given = torch.Tensor | None


def _bound(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    pointers: Sequence[Any],
    rows_of: Sequence[torch.Tensor],
    numbers: Sequence[int | float],
) -> Bound:
    """Return a call: pointers, sizes, the strides of codes, scales and other rows, numbers."""
    rows, d = codes.shape
    values = [0 if pointer is None else pointer for pointer in pointers]
    strides = (codes.stride(0), *scale_strides(scales), *(one.stride(0) for one in rows_of))
    variant = {"scalar_t": SCALARS[dtype], "quant_t": QUANTS[codes.dtype]}
    all_values = (codes, scales, *values, rows, d, *strides, *numbers)
    return Bound(variant, {"rows": rows, "d": d}, all_values)


def _group(group: int, scale: Given) -> int:
    """Return the group size that a kernel is told: a given scale is one for all, without groups."""
    return 0 if scale is not None else group


def _quantize_bind(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, scale: Given, maxima: Given,
    group: int,
) -> Bound:  # fmt: skip
    count = 0 if maxima is None else maxima.numel()
    if count % 4:
        raise ValueError(f"quantize: {count} maxima; want a multiple of 4")
    return _bound(out, out_scale, x.dtype, (x, scale, maxima), (x,), (_group(group, scale), count))


def _quantize_reference(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, scale: Given, maxima: Given,
    group: int,
) -> Results:  # fmt: skip
    """[rows, d] -> codes [rows, d], and scales [rows, 1], [rows, d / 128] or [1]."""
    if maxima is not None:
        scale = scales_of(maxima.amax().reshape(1), _dtype(out))
    return quantised(x, _dtype(out), scale, group)


def _dtype(out: torch.Tensor) -> torch.dtype:
    """Return the dtype of codes; a test gives them in float64, but for integers."""
    return torch.int8 if out.dtype == torch.int8 else torch.float8_e4m3fn


def _amax_bind(out: torch.Tensor, x: torch.Tensor) -> Bound:
    rows, d = x.shape
    sizes = {"rows": rows, "d": d, "parts": out.numel()}
    return Bound({"scalar_t": SCALARS[x.dtype]}, sizes, (out, x, rows, d, x.stride(0)))


def _amax_reference(out: torch.Tensor, x: torch.Tensor) -> Results:
    """[rows, d] -> [num_parts]: the largest magnitude of rows b, b + num_parts, ..."""
    parts = out.numel()
    largest = x.abs().float().amax(-1) if x.shape[1] else x.new_zeros(x.shape[0]).float()
    return (F.pad(largest, (0, -x.shape[0] % parts)).reshape(-1, parts).amax(0)
            if x.shape[0] else largest.new_zeros(parts),)  # fmt: skip


def _amax_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((sizes["parts"], 1, 1), (_PARTS_THREADS, 1, 1))


def _norm_bind(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
    scale: Given, group: int, eps: float, offset: float,
) -> Bound:  # fmt: skip
    numbers = (_group(group, scale), 1.0 / max(x.shape[1], 1), eps, offset)
    return _bound(out, out_scale, x.dtype, (x, weight, scale), (x,), numbers)


def _norm_reference(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
    scale: Given, group: int, eps: float, offset: float,
) -> Results:  # fmt: skip
    """[rows, d], [d] -> codes and scales of the norm."""
    return quantised(normalise(x, weight, eps, offset), _dtype(out), scale, group)


def _fused_bind(  # noqa: PLR0913 (the operator's arguments)
    out: torch.Tensor, out_scale: torch.Tensor, residual: torch.Tensor, x: torch.Tensor,
    weight: torch.Tensor, scale: Given, group: int, eps: float, offset: float,
) -> Bound:  # fmt: skip
    numbers = (_group(group, scale), 1.0 / max(x.shape[1], 1), eps, offset)
    pointers = (residual, x, weight, scale)
    return _bound(out, out_scale, x.dtype, pointers, (residual, x), numbers)


def _fused_reference(  # noqa: PLR0913 (the operator's arguments)
    out: torch.Tensor, out_scale: torch.Tensor, residual: torch.Tensor, x: torch.Tensor,
    weight: torch.Tensor, scale: Given, group: int, eps: float, offset: float,
) -> Results:  # fmt: skip
    """[rows, d] twice, [d] -> codes and scales of the norm of the sum, and the sum."""
    total = x + residual
    codes = quantised(normalise(total, weight, eps, offset), _dtype(out), scale, group)
    return (*codes, total)


def _silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _silu_bind(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, scale: Given, group: int
) -> Bound:
    return _bound(out, out_scale, x.dtype, (x, scale), (x,), (_group(group, scale),))


def _silu_reference(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, scale: Given, group: int
) -> Results:
    """[rows, 2d] -> codes and scales of silu(x[:, :d]) * x[:, d:]."""
    return quantised(_silu(x), _dtype(out), scale, group)


def _norm_error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    codes, scales, x, weight, _, _, eps, offset = arguments
    y = normalise(x.double(), weight.double(), eps, offset)
    return code_error(codes, scales, wanted[1], y, x.dtype)


def _fused_error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    codes, scales, residual, x, weight, _, _, eps, offset = arguments
    y = normalise(residual.double(), weight.double(), eps, offset)
    sums = largest_error(residual, wanted[2]) / torch.finfo(residual.dtype).eps  # exact to a unit
    error = code_error(codes, scales, wanted[1], y, x.dtype)
    return error if sums <= 1.01 else sums


def _silu_error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    codes, scales, x, *_ = arguments
    return code_error(codes, scales, wanted[1], _silu(x.double()), x.dtype)


def _rows(variant: Variant, sizes: Sizes, device: str, width: int = 1) -> torch.Tensor:
    rows, d, gap = sizes["rows"], width * sizes["d"], sizes.get("gap", 0)
    x = torch.randn(rows, d + gap, device=device).mul_(2)
    if rows > 1:
        x[1] = 0  # what must not divide by zero
    return x.to(DTYPES[variant["scalar_t"]])[:, :d]


def _weight(variant: Variant, sizes: Sizes, device: str) -> torch.Tensor:
    return torch.randn(sizes["d"], device=device).add_(1).to(DTYPES[variant["scalar_t"]])


def _quantize_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    codes, scales, given, group = code_inputs(variant, sizes, device)
    rows, maxima = _rows(variant, sizes, device), None
    if sizes.get("maxima"):  # the largest comes last
        given, maxima = None, torch.linspace(0.1, 3.0, _TEST_MAXIMA, device=device)
    return codes, scales, rows, given, maxima, group


def _amax_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    x = _rows(variant, sizes, device)
    # The largest magnitude comes last, with a sign, and is another in each row.
    x[:, -1] = -20.0 - torch.arange(x.shape[0], device=device)
    return torch.empty(sizes["parts"], device=device), x


def _norm_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    codes, scales, given, group = code_inputs(variant, sizes, device)
    rows, weight = _rows(variant, sizes, device), _weight(variant, sizes, device)
    return codes, scales, rows, weight, given, group, 1e-6, float(sizes.get("offset", 0))


def _fused_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    codes, scales, *rest = _norm_inputs(variant, sizes, device)
    return codes, scales, _rows(variant, sizes, device), *rest


def _silu_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    codes, scales, given, group = code_inputs(variant, sizes, device)
    return codes, scales, _rows(variant, sizes, device, width=2), given, group


def _cost(reads: int, writes: int, more: int, variant: Variant, sizes: Sizes) -> Cost:
    """Rows read and written, the codes and scales, and what there is once a column."""
    elements, itemsize = sizes["rows"] * sizes["d"], DTYPES[variant["scalar_t"]].itemsize
    rows = ((reads + writes) * elements + more * sizes["d"]) * itemsize
    extra = 4 * _TEST_MAXIMA if sizes.get("maxima") else 4 if sizes.get("given") else 0
    return Cost(rows + code_bytes(sizes) + extra, (3 + 2 * reads) * elements)


def _amax_cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost(elements * DTYPES[variant["scalar_t"]].itemsize + 4 * sizes["parts"], elements)


_SIZES: list[Sizes] = [
    {"rows": 0, "d": 64},
    {"rows": 1, "d": 1},
    {"rows": 3, "d": 7, "offset": 1},
    {"rows": 5, "d": 256, "group": 128, "gap": 16, "column_major": 1},
    {"rows": 4, "d": 192, "given": 1, "gap": 8},
    {"rows": 2, "d": 129, "gap": 1},
    {"rows": 3, "d": 2048, "code_gap": 4},
    {"rows": 37, "d": 128, "gap": 3, "group": 128},
    {"rows": 34, "d": 60, "gap": 4},
    {"rows": 5, "d": 128, "group": 128},
    {"rows": 2, "d": 2176, "group": 128},
    {"rows": 2, "d": 4104, "gap": 8, "offset": 1},
    {"rows": 1, "d": 16512, "group": 128},
    {"rows": 1, "d": 16392},
]
_MAXIMA: list[Sizes] = [{"rows": 3, "d": 40, "given": 1, "maxima": 1}]
_PARTS: list[Sizes] = [
    {"rows": rows, "d": d, "gap": gap, "parts": 3}
    for rows, d, gap in [(0, 64, 0), (1, 1, 0), (3, 7, 0), (7, 129, 1), (8, 136, 8), (2, 9000, 8)]
]


def _bench(group: int = 0) -> list[Sizes]:
    sizes = [{"rows": rows, "d": 4096, "group": group} for rows in (1, 16, 128, 1024, 8192)]
    return [*sizes, {"rows": 8192, "d": 8192, "group": group}]


def _spec(
    name: str, schema: str, arguments: str, bind: Callable[..., Bound],
    reference: Callable[..., Results], inputs: Callable[..., tuple[Any, ...]],
    cost: Callable[[Variant, Sizes], Cost], error: Any = None, **changes: Any,
) -> KernelSpec:  # fmt: skip
    """Declare a kernel of codes. ``arguments``: a letter each for pointer, int64, int32, float."""
    kinds = {"p": "pointer", "l": "int64", "i": "int32", "f": "float"}
    given: dict[str, Any] = {
        "params": _PARAMS, "geometry": row_geometry, "sizes": _SIZES,
        "bench_sizes": [*_bench(), *_bench(128)[3:]],
        "tolerance": _TOLERANCE if error else 0.0,
        "bench_needs": {"scalar_t": "kiln::bf16", "quant_t": "kiln::e4m3"},
    } | changes  # fmt: skip
    return KernelSpec(
        name=name, source=f"quantization/{name}.cu", entry=name, schema=f"({schema}) -> ()",
        arguments=[kinds[kind] for kind in arguments], bind=bind, reference=reference,
        make_inputs=inputs, cost=cost, error=error, paper=_PAPER, **given,
    )  # fmt: skip


def is_fused(dtype: torch.dtype) -> bool:
    """Return whether rows of a dtype are made and quantised by one kernel, or by two.

    By one in bf16, the dtype of quantised checkpoints: each program is built for every target.
    """
    return dtype == torch.bfloat16


def _comes_fused(variant: Variant) -> bool:
    return is_fused(DTYPES[variant["scalar_t"]])


QUANTIZE = _spec(
    "quantize", f"{_OUTPUTS}, Tensor x, Tensor? scale, Tensor? maxima, int group_size",
    "ppppp" + "llllll" + "ii", _quantize_bind, _quantize_reference, _quantize_inputs,
    partial(_cost, 1, 0, 0), sizes=[*_SIZES, *_MAXIMA],
)  # fmt: skip
TENSOR_AMAX = _spec(
    "tensor_amax", "Tensor(a!) out, Tensor x", "pp" + "lll", _amax_bind, _amax_reference,
    _amax_inputs, _amax_cost, params={"scalar_t": list(DTYPES)}, geometry=_amax_geometry,
    sizes=_PARTS,
    # 4096 x 4096: what reading 32 MiB takes, and so the least that attention to as much could.
    bench_sizes=[{**sizes, "parts": 256} for sizes in [{**_bench()[-1], "rows": 4096, "d": 4096},
                                                        *_bench()]],
    bench_needs={"scalar_t": "kiln::bf16"},
)  # fmt: skip
RMS_NORM_QUANT = _spec(
    "rms_norm_quant", f"{_OUTPUTS}, Tensor x, Tensor weight, Tensor? scale, {_NUMBERS}",
    "ppppp" + "llllll" + "ifff", _norm_bind, _norm_reference, _norm_inputs,
    partial(_cost, 1, 0, 1), _norm_error, comes=_comes_fused, geometry=doubled_row_geometry,
    optional=True, max_cpu_seconds=0.4,
)  # fmt: skip
FUSED_ADD_RMS_NORM_QUANT = _spec(
    "fused_add_rms_norm_quant",
    f"{_OUTPUTS}, Tensor(c!) residual, Tensor x, Tensor weight, Tensor? scale, {_NUMBERS}",
    "pppppp" + "lllllll" + "ifff", _fused_bind, _fused_reference, _fused_inputs,
    partial(_cost, 2, 1, 1), _fused_error, comes=_comes_fused,
    optional=True, max_cpu_seconds=0.4,
)  # fmt: skip
SILU_AND_MUL_QUANT = _spec(
    "silu_and_mul_quant", f"{_OUTPUTS}, Tensor x, Tensor? scale, int group_size",
    "pppp" + "llllll" + "i", _silu_bind, _silu_reference, _silu_inputs,
    partial(_cost, 2, 0, 0), _silu_error, comes=_comes_fused,
    optional=True, max_cpu_seconds=0.4,
)  # fmt: skip
SPECS = [QUANTIZE, TENSOR_AMAX, RMS_NORM_QUANT, FUSED_ADD_RMS_NORM_QUANT, SILU_AND_MUL_QUANT]
