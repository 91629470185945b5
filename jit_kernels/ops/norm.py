"""Root mean square norms: rms_norm, and fused_add_rms_norm for the residual stream."""

from __future__ import annotations

import torch

from kiln.jit_kernels.references.norm import normalise
from kiln.jit_kernels.row_geometry import row_geometry
from kiln.jit_kernels.shapes import as_rows, check_dtype, check_shape, dense_rows, takes_arrays
from kiln.jit_kernels.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    KernelSpec,
    Sizes,
    Variant,
)
from kiln.jit_kernels.torch_ops import call, define


@takes_arrays
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., d].

    weight: [d]. Rows may be strided. The mean is taken in float32 and the normalised row rounded
    to x's dtype before weight multiplies it. With ``weight_offset``, such as Gemma's 1, the factor
    is weight_offset + weight, and the product alone is rounded. A row's bits depend on no other
    row. With ``out`` (x itself is fine), write there and return it. Raises ValueError on a wrong
    shape, TypeError on a dtype other than bf16, fp16, fp32.
    Source: https://arxiv.org/abs/1910.07467, and LlamaRMSNorm and GemmaRMSNorm of transformers
    """
    if out is None:
        out = x.new_empty(x.shape)
    check_dtype("rms_norm", x=x, weight=weight, out=out)
    check_shape("rms_norm", "weight", weight, x.shape[-1:])
    check_shape("rms_norm", "out", out, x.shape)
    rows = as_rows(out)
    if rows is None:
        dense = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return out.copy_(rms_norm(x, weight, eps, dense, weight_offset))
    call(_RMS_NORM, rows, dense_rows(x), weight.contiguous(), eps, weight_offset)
    return out


@takes_arrays
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    """Add x to residual and put the norm of the sum in x, both in place, in one pass.

    residual += x; x = rms_norm(residual, weight, eps, weight_offset), bit for bit as those two
    would. x and residual: [..., d] of one shape, rows may be strided; weight: [d]. Raises
    ValueError on a wrong shape or on rows that no view can reach, TypeError on an unsupported
    dtype.
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
    call(_FUSED, rows, sums, weight.contiguous(), eps, weight_offset)


def _rms_norm_reference(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor]:
    """[rows, d], [d] -> [rows, d]."""
    return (normalise(x, weight, eps, weight_offset),)


def _fused_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, d], [rows, d], [d] -> the new x and residual, [rows, d] each."""
    total = x + residual
    return normalise(total, weight, eps, weight_offset), total


def _bind(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> Bound:
    rows, d = first.shape
    strides = (first.stride(0), second.stride(0))
    values = (first, second, weight, rows, d, *strides, 1.0 / max(d, 1), eps, offset)
    return Bound({"scalar_t": SCALARS[first.dtype]}, {"rows": rows, "d": d}, values)


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
    weight, offset = _weight(variant, sizes, device), sizes.get("offset", 0) / 1.0
    return _rows(variant, sizes, device), x, weight, 1e-6, offset


def _fused_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[object, ...]:
    x, residual = _rows(variant, sizes, device), _rows(variant, sizes, device)
    weight, offset = _weight(variant, sizes, device), sizes.get("offset", 0) / 1.0
    return x, residual, weight, 1e-5, offset


_SIZES = [
    {"rows": rows, "d": d, "gap": gap, "offset": offset}
    for rows, d, gap, offset in [
        (0, 64, 0, 0), (1, 1, 0, 0), (3, 7, 0, 1), (2, 129, 1, 0), (5, 192, 8, 0), (3, 2048, 0, 1),
        (37, 64, 3, 0), (35, 64, 0, 0), (34, 60, 4, 0), (2, 896, 0, 0), (2, 4104, 8, 0),
        (2, 4100, 3, 1), (1, 8192, 0, 0), (1, 16392, 0, 0),
    ]
]  # fmt: skip
_BENCH_SIZES = [{"rows": rows, "d": 4096} for rows in (1, 16, 128, 1024, 8192)] + [
    {"rows": rows, "d": d} for d in (896, 2048, 8192) for rows in (1, 128, 8192)
]
_NUMBERS = "Tensor weight, float eps, float weight_offset"
_ARGUMENTS = (*["pointer"] * 3, *["int64"] * 4, *["float"] * 3)
_TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# The sum is rounded too, and Triton's interpreter rounds bf16 down: three whole units.
_FUSED_TOLERANCE = {**_TOLERANCE, torch.bfloat16: 2.4e-2}

_RMS_NORM = KernelSpec(
    name="rms_norm",
    source="norm/rms_norm.cu",
    entry="rms_norm",
    schema=f"(Tensor(a!) out, Tensor x, {_NUMBERS}) -> ()",
    arguments=_ARGUMENTS,
    params={"scalar_t": list(DTYPES)},
    bind=_bind,
    geometry=row_geometry,
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
    schema=f"(Tensor(a!) x, Tensor(b!) residual, {_NUMBERS}) -> ()",
    arguments=_ARGUMENTS,
    params={"scalar_t": list(DTYPES)},
    bind=_bind,
    geometry=row_geometry,
    cost=_fused_cost,
    reference=_fused_reference,
    make_inputs=_fused_inputs,
    sizes=_SIZES,
    bench_sizes=_BENCH_SIZES,
    tolerance=_FUSED_TOLERANCE,
    max_cpu_seconds=0.4,
    paper="https://arxiv.org/abs/1910.07467",
)
SPECS = [_RMS_NORM, _FUSED]
define(SPECS)
