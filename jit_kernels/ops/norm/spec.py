"""The specs of the norms."""

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
from kiln.jit_kernels.declare.spec import DTYPES, SCALARS, Bound, Cost, KernelSpec, Sizes, Variant
from kiln.jit_kernels.ops.norm import cases
from kiln.jit_kernels.ops.norm.factors import FACTORS, derived_of
from kiln.jit_kernels.ops.norm.reference import fused_reference, rms_norm_reference
from kiln.jit_kernels.ops.shared.row_geometry import row_geometry
from kiln.jit_kernels.torch_ops import define

_TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Three units: the sum is rounded too, and Triton's interpreter rounds bf16 down.
_FUSED_TOLERANCE = {**_TOLERANCE, torch.bfloat16: 2.4e-2}


def _rms_norm_bind(a: Arguments) -> Bound:
    return _bound(a, {"out_stride": a.out.stride(0), "x_stride": a.x.stride(0)})


def _fused_bind(a: Arguments) -> Bound:
    return _bound(a, {"x_stride": a.x.stride(0), "residual_stride": a.residual.stride(0)})


def _bound(a: Arguments, strides: dict[str, int]) -> Bound:
    rows, d = a.x.shape
    numbers = {"rows": rows, "d": d, "inverse_d": 1.0 / max(d, 1), **strides, **derived_of(a)}
    return Bound({"scalar_t": SCALARS[a.x.dtype]}, {"rows": rows, "d": d}, numbers)


def _rms_norm_cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost((2 * elements + sizes["d"]) * DTYPES[variant["scalar_t"]].itemsize, 4 * elements)


def _fused_cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost((4 * elements + sizes["d"]) * DTYPES[variant["scalar_t"]].itemsize, 5 * elements)


RMS_NORM = KernelSpec(
    name="rms_norm",
    source="norm/rms_norm.cu",
    entry="rms_norm",
    parameters=declare(
        outputs("out"),
        inputs("x", "weight"),
        derived("int64", "rows", "d", "out_stride", "x_stride"),
        derived("float", "inverse_d"),
        FACTORS,
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_rms_norm_bind,
    geometry=row_geometry,
    cost=_rms_norm_cost,
    reference=rms_norm_reference,
    make_inputs=cases.rms_norm_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=_TOLERANCE,
    paper="https://arxiv.org/abs/1910.07467",
)
FUSED_ADD_RMS_NORM = KernelSpec(
    name="fused_add_rms_norm",
    source="norm/fused_add_rms_norm.cu",
    entry="fused_add_rms_norm",
    parameters=declare(
        in_outs("x", "residual"),
        inputs("weight"),
        derived("int64", "rows", "d", "x_stride", "residual_stride"),
        derived("float", "inverse_d"),
        FACTORS,
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_fused_bind,
    geometry=row_geometry,
    cost=_fused_cost,
    reference=fused_reference,
    make_inputs=cases.fused_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=_FUSED_TOLERANCE,
    max_cpu_seconds=0.4,
    paper="https://arxiv.org/abs/1910.07467",
)
SPECS = [RMS_NORM, FUSED_ADD_RMS_NORM]
define(SPECS)
