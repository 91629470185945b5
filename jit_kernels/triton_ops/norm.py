"""Triton forms of the norms: same arguments as the operators, written in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _normalise(value, weight, d, eps, offset, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Round as transformers does: LlamaRMSNorm, or GemmaRMSNorm where there is an offset."""
    normal = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / d + eps))
    if OFFSET:
        return (normal * (offset + weight)).to(dtype)
    return (normal.to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def _rms_norm(  # noqa: PLR0913
    out, x, weight, d, out_stride, x_stride, eps, offset, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(value, factor, d, eps, offset, OFFSET, out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, y, mask=mask)


@triton.jit
def _fused(  # noqa: PLR0913
    x, residual, weight, d, x_stride, sum_stride, eps, offset,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    added = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual + row * sum_stride + columns, mask=mask, other=0.0)
    total = (added + total.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(residual + row * sum_stride + columns, total, mask=mask)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(total.to(tl.float32), factor, d, eps, offset, OFFSET, x.dtype.element_ty)
    tl.store(x + row * x_stride + columns, y, mask=mask)


def rms_norm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> None:
    """Write the norm of each row of x, times the weight, to out.

    x, out: [rows, d], weight: [d].
    """
    rows, d = x.shape
    if rows and d:
        strides = (out.stride(0), x.stride(0))
        offset = (weight_offset, weight_offset != 0)
        _rms_norm[(rows,)](out, x, weight, d, *strides, eps, *offset, triton.next_power_of_2(d))


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
) -> None:
    """Add x to residual, then put the norm of the sum in x. [rows, d] each, weight: [d]."""
    rows, d = x.shape
    if rows and d:
        strides = (x.stride(0), residual.stride(0))
        offset = (weight_offset, weight_offset != 0)
        _fused[(rows,)](x, residual, weight, d, *strides, eps, *offset, triton.next_power_of_2(d))
