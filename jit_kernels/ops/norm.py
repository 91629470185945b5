"""Root mean square norms: rms_norm, and fused_add_rms_norm for the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kiln.jit_kernels.shapes import as_rows, check_dtype, check_shape, dense_rows, takes_arrays
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


@takes_arrays
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., d].

    weight: [d]. Rows may be strided. The mean is taken in float32 and the normalised row rounded
    to x's dtype before weight multiplies it. With ``out`` (x itself is fine), write there and
    return it. Raises ValueError on a wrong shape, TypeError on a dtype other than bf16, fp16,
    fp32. Source: https://arxiv.org/abs/1910.07467
    """
    if out is None:
        out = x.new_empty(x.shape)
    check_dtype("rms_norm", x=x, weight=weight, out=out)
    check_shape("rms_norm", "weight", weight, x.shape[-1:])
    check_shape("rms_norm", "out", out, x.shape)
    rows = as_rows(out)
    if rows is None:
        dense = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return out.copy_(rms_norm(x, weight, eps, dense))
    call(_RMS_NORM, rows, dense_rows(x), weight.contiguous(), eps)
    return out


@takes_arrays
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """Add x to residual and put the norm of the sum in x, both in place, in one pass.

    residual += x; x = rms_norm(residual, weight, eps), bit for bit as those two would. x and
    residual: [..., d] of one shape, rows may be strided; weight: [d]. Raises ValueError on a
    wrong shape or on rows that no view can reach, TypeError on an unsupported dtype.
    """
    check_dtype("fused_add_rms_norm", x=x, residual=residual, weight=weight)
    check_shape("fused_add_rms_norm", "weight", weight, x.shape[-1:])
    check_shape("fused_add_rms_norm", "residual", residual, x.shape)
    rows, sums = as_rows(x), as_rows(residual)
    if rows is None or sums is None:
        raise ValueError(
            f"fused_add_rms_norm works in place and needs dense rows at one distance; x has "
            f"strides {x.stride()}, residual {residual.stride()}: pass contiguous tensors"
        )
    call(_FUSED, rows, sums, weight.contiguous(), eps)


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def _rms_norm_reference(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor]:
    """[rows, d], [d] -> [rows, d]."""
    return (_normalise(x, weight, eps),)


def _fused_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, d], [rows, d], [d] -> the new x and residual, [rows, d] each."""
    total = x + residual
    return _normalise(total, weight, eps), total


def _rms_norm_bind(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Bound:
    rows, d = x.shape
    values = (out, x, weight, rows, d, out.stride(0), x.stride(0), eps)
    return Bound({"scalar_t": SCALARS[x.dtype]}, {"rows": rows, "d": d}, values)


def _fused_bind(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Bound:
    rows, d = x.shape
    values = (x, residual, weight, rows, d, x.stride(0), residual.stride(0), eps)
    return Bound({"scalar_t": SCALARS[x.dtype]}, {"rows": rows, "d": d}, values)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """One block a row, with a thread for each vector up to 1024, in whole warps."""
    vectors = -(-sizes["d"] * DTYPES[variant["scalar_t"]].itemsize // 16)
    threads = min(max(-(-vectors // 32), 1) * 32, 1024)
    return LaunchGeometry((min(sizes["rows"], 2**31 - 1), 1, 1), (threads, 1, 1))


def _rms_norm_cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost((2 * elements + sizes["d"]) * DTYPES[variant["scalar_t"]].itemsize, 4 * elements)


def _fused_cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost((4 * elements + sizes["d"]) * DTYPES[variant["scalar_t"]].itemsize, 5 * elements)


def _rows(variant: Variant, sizes: Sizes, device: str) -> torch.Tensor:
    rows, d, gap = sizes["rows"], sizes["d"], sizes.get("gap", 0)
    x = torch.randn(rows, d + gap, device=device).mul_(2)
    return x.to(DTYPES[variant["scalar_t"]])[:, :d]


def _weight(variant: Variant, sizes: Sizes, device: str) -> torch.Tensor:
    return torch.randn(sizes["d"], device=device).add_(1).to(DTYPES[variant["scalar_t"]])


def _rms_norm_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[object, ...]:
    x = _rows(variant, sizes, device)
    return torch.empty_like(_rows(variant, sizes, device)), x, _weight(variant, sizes, device), 1e-6


def _fused_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[object, ...]:
    x, residual = _rows(variant, sizes, device), _rows(variant, sizes, device)
    return x, residual, _weight(variant, sizes, device), 1e-5


_SIZES = [
    {"rows": rows, "d": d, "gap": gap}
    for rows, d, gap in [
        (0, 64, 0), (1, 1, 0), (3, 7, 0), (2, 129, 1), (5, 192, 8), (3, 2048, 0), (2, 4100, 3),
    ]
]  # fmt: skip
_BENCH_SIZES = [{"rows": rows, "d": 4096} for rows in (1, 16, 128, 1024, 8192)]
_TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

_RMS_NORM = KernelSpec(
    name="rms_norm",
    source="norm/rms_norm.cu",
    entry="rms_norm",
    schema="(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()",
    arguments=("pointer", "pointer", "pointer", "int64", "int64", "int64", "int64", "float"),
    params={"scalar_t": list(DTYPES)},
    bind=_rms_norm_bind,
    geometry=_geometry,
    cost=_rms_norm_cost,
    reference=_rms_norm_reference,
    make_inputs=_rms_norm_inputs,
    sizes=_SIZES,
    bench_sizes=_BENCH_SIZES,
    tolerance=_TOLERANCE,
    paper="https://arxiv.org/abs/1910.07467",
)
_FUSED = KernelSpec(
    name="fused_add_rms_norm",
    source="norm/fused_add_rms_norm.cu",
    entry="fused_add_rms_norm",
    schema="(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()",
    arguments=("pointer", "pointer", "pointer", "int64", "int64", "int64", "int64", "float"),
    params={"scalar_t": list(DTYPES)},
    bind=_fused_bind,
    geometry=_geometry,
    cost=_fused_cost,
    reference=_fused_reference,
    make_inputs=_fused_inputs,
    sizes=_SIZES,
    bench_sizes=_BENCH_SIZES,
    tolerance=_TOLERANCE,
    paper="https://arxiv.org/abs/1910.07467",
)
SPECS = [_RMS_NORM, _FUSED]
define(SPECS)
