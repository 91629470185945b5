"""The specs of the kernels that quantise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    KernelValue,
    Parameter,
    Parameters,
    declare,
    derived,
    in_outs,
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
from kiln.jit_kernels.ops.norm.factors import FACTORS, derived_of
from kiln.jit_kernels.ops.quantization import cases, reference
from kiln.jit_kernels.ops.quantization.codes import QUANTS
from kiln.jit_kernels.ops.shared.row_geometry import doubled_row_geometry, row_geometry
from kiln.jit_kernels.torch_ops import define

_PARTS_THREADS = 512
_NORM = [*derived("float", "inverse_d"), *FACTORS]
_COMMON = {
    "params": {"scalar_t": list(DTYPES), "quant_t": list(QUANTS.values())},
    "geometry": row_geometry,
    "sizes": cases.SIZES,
    "bench_sizes": cases.BENCH_SIZES,
    "bench_needs": {"scalar_t": "kiln::bf16", "quant_t": "kiln::e4m3"},
    "paper": "https://arxiv.org/abs/2209.05433",  # scales: https://arxiv.org/abs/2412.19437
}


def _declare(
    tensors: Sequence[Parameter],
    *numbers: Sequence[Parameter],
    scale: Sequence[str] = ("scale",),
    strides: Sequence[str] = ("x_stride",),
) -> Parameters:
    """Declare a kernel that writes codes and scales: ``tensors`` and ``numbers`` are its own."""
    return declare(
        outputs("out", "scales"),
        tensors,
        optional(*scale),
        derived("int64", "rows", "d", "out_stride", "scale_stride", "group_stride", *strides),
        operator_only("int32", "group_size"),
        derived("int32", "group"),  # group_size, or 0 if one scale is given for all
        *numbers,
    )


def is_fused(dtype: torch.dtype) -> bool:
    """Return whether one fused kernel computes and quantises rows of a dtype.

    Only in bf16, the dtype of quantised checkpoints; other dtypes use two kernels.
    """
    return dtype == torch.bfloat16


def _supported(variant: Variant) -> bool:
    return is_fused(DTYPES[variant["scalar_t"]])


_FUSED = {
    **_COMMON,
    "is_supported": _supported,
    "tolerance": 1.01,  # relative to the rounding error of the dtype and the codes
    "has_unfused_path": True,
    "max_cpu_seconds": 0.4,
}


def _spec(name: str, parameters: Parameters, **given: Any) -> KernelSpec:
    source = f"quantization/{name}.cu"
    return KernelSpec(name=name, source=source, entry=name, parameters=parameters, **given)


def _bind(a: Arguments, **more: KernelValue) -> Bound:
    """Return a call; ``more``: derived parameters that only some of these kernels have."""
    rows, d = a.out.shape
    one_scale = a.scales.dim() == 1
    numbers = {
        "rows": rows,
        "d": d,
        "out_stride": a.out.stride(0),
        "scale_stride": 0 if one_scale else a.scales.stride(0),
        "group_stride": 0 if one_scale else a.scales.stride(1),
        "x_stride": a.x.stride(0),
        "group": a.group_size if a.scale is None else 0,
        **more,
    }
    variant = {"scalar_t": SCALARS[a.x.dtype], "quant_t": QUANTS[a.out.dtype]}
    return Bound(variant, {"rows": rows, "d": d}, numbers)


def _quantize_bind(a: Arguments) -> Bound:
    count = 0 if a.maxima is None else a.maxima.numel()
    if count % 4:
        raise ValueError(f"quantize: {count} maxima; want a multiple of 4")
    return _bind(a, num_maxima=count)


def _rms_norm_bind(a: Arguments) -> Bound:
    return _bind(a, inverse_d=1.0 / max(a.x.shape[1], 1), **derived_of(a))


def _fused_add_bind(a: Arguments) -> Bound:
    inverse_d = 1.0 / max(a.x.shape[1], 1)
    stride = a.residual.stride(0)
    return _bind(a, residual_stride=stride, inverse_d=inverse_d, **derived_of(a))


def _amax_bind(a: Arguments) -> Bound:
    rows, d = a.x.shape
    numbers = {"rows": rows, "d": d, "x_stride": a.x.stride(0)}
    sizes = {"rows": rows, "d": d, "parts": a.out.numel()}
    return Bound({"scalar_t": SCALARS[a.x.dtype]}, sizes, numbers)


def _amax_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((sizes["parts"], 1, 1), (_PARTS_THREADS, 1, 1))


def _cost(reads: int, writes: int, more: int, variant: Variant, sizes: Sizes) -> Cost:
    """Count rows read and written, codes and scales, and ``more`` rows read once."""
    elements, itemsize = sizes["rows"] * sizes["d"], DTYPES[variant["scalar_t"]].itemsize
    rows = ((reads + writes) * elements + more * sizes["d"]) * itemsize
    extra = 4 * cases.NUM_MAXIMA if sizes.get("maxima") else 4 if sizes.get("given") else 0
    return Cost(rows + cases.code_bytes(sizes) + extra, (3 + 2 * reads) * elements)


def _amax_cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost(elements * DTYPES[variant["scalar_t"]].itemsize + 4 * sizes["parts"], elements)


QUANTIZE = _spec(
    "quantize",
    _declare(inputs("x"), derived("int32", "num_maxima"), scale=("scale", "maxima")),
    bind=_quantize_bind,
    cost=partial(_cost, 1, 0, 0),
    reference=reference.quantize_reference,
    make_inputs=cases.quantize_inputs,
    **{**_COMMON, "sizes": cases.QUANTIZE_SIZES, "tolerance": 0.0},
)
TENSOR_AMAX = _spec(
    "tensor_amax",
    declare(outputs("out"), inputs("x"), derived("int64", "rows", "d", "x_stride")),
    params={"scalar_t": list(DTYPES)},
    bind=_amax_bind,
    geometry=_amax_geometry,
    cost=_amax_cost,
    reference=reference.tensor_amax_reference,
    make_inputs=cases.tensor_amax_inputs,
    sizes=cases.AMAX_SIZES,
    bench_sizes=cases.AMAX_BENCH_SIZES,
    tolerance=0.0,
    paper=_COMMON["paper"],
)
RMS_NORM_QUANT = _spec(
    "rms_norm_quant",
    _declare(inputs("x", "weight"), _NORM),
    bind=_rms_norm_bind,
    cost=partial(_cost, 1, 0, 1),
    reference=reference.rms_norm_quant_reference,
    make_inputs=cases.rms_norm_quant_inputs,
    error=reference.rms_norm_quant_error,
    **{**_FUSED, "geometry": doubled_row_geometry},
)
FUSED_ADD_RMS_NORM_QUANT = _spec(
    "fused_add_rms_norm_quant",
    _declare(
        in_outs("residual") + inputs("x", "weight"),
        _NORM,
        strides=("residual_stride", "x_stride"),
    ),
    bind=_fused_add_bind,
    cost=partial(_cost, 2, 1, 1),
    reference=reference.fused_add_rms_norm_quant_reference,
    make_inputs=cases.fused_add_rms_norm_quant_inputs,
    error=reference.fused_add_rms_norm_quant_error,
    **_FUSED,
)
SILU_AND_MUL_QUANT = _spec(
    "silu_and_mul_quant",
    _declare(inputs("x")),
    bind=_bind,
    cost=partial(_cost, 2, 0, 0),
    reference=reference.silu_and_mul_quant_reference,
    make_inputs=cases.silu_and_mul_quant_inputs,
    error=reference.silu_and_mul_quant_error,
    **_FUSED,
)
SPECS = [QUANTIZE, TENSOR_AMAX, RMS_NORM_QUANT, FUSED_ADD_RMS_NORM_QUANT, SILU_AND_MUL_QUANT]
define(SPECS)
