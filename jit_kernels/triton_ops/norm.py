"""Triton forms of the norms: same arguments as the operators, written in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(out, x, weight, d, out_stride, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / d + eps)
    normal = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    scaled = normal * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fused(x, residual, weight, d, x_stride, residual_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    added = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
    total = (added + total.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(residual + row * residual_stride + columns, total, mask=mask)
    value = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / d + eps)
    normal = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    scaled = normal * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * x_stride + columns, scaled.to(x.dtype.element_ty), mask=mask)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Write the norm of each row of x, times weight, to out. x, out: [rows, d], weight: [d]."""
    rows, d = x.shape
    if rows and d:
        block = triton.next_power_of_2(d)
        _rms_norm[(rows,)](out, x, weight, d, out.stride(0), x.stride(0), eps, block)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """Add x to residual, then put the norm of the sum in x. [rows, d] each, weight: [d]."""
    rows, d = x.shape
    if rows and d:
        block = triton.next_power_of_2(d)
        _fused[(rows,)](x, residual, weight, d, x.stride(0), residual.stride(0), eps, block)
