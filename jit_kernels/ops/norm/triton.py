"""Triton forms of the norms."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.ops.norm.factors import rounds_once


@triton.jit
def _normalise(value, weight, d, eps, weight_offset, ONCE: tl.constexpr, dtype: tl.constexpr):
    """Return the norm, rounded like LlamaRMSNorm, or once: like Olmo2RMSNorm and GemmaRMSNorm."""
    normal = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / d + eps))
    if ONCE:
        return (normal * (weight_offset + weight)).to(dtype)
    return (normal.to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def _rms_norm(  # noqa: PLR0913
    out, x, weight, d, out_stride, x_stride, eps, weight_offset,
    ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(value, factor, d, eps, weight_offset, ONCE, out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, y, mask=mask)


@triton.jit
def _fused(  # noqa: PLR0913
    x, residual, weight, d, x_stride, residual_stride, eps, weight_offset,
    ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    added = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
    total = (added + total.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(residual + row * residual_stride + columns, total, mask=mask)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(total.to(tl.float32), factor, d, eps, weight_offset, ONCE, x.dtype.element_ty)
    tl.store(x + row * x_stride + columns, y, mask=mask)


def rms_norm(a: Arguments) -> None:
    """Write the norm of each row of x, times the weight, to out."""
    _launch(_rms_norm, a, a.out, a.x)


def fused_add_rms_norm(a: Arguments) -> None:
    """Add x to residual, then write the norm of the sum to x."""
    _launch(_fused, a, a.x, a.residual)


def _launch(kernel: Any, a: Arguments, first: torch.Tensor, second: torch.Tensor) -> None:
    rows, d = a.x.shape
    if rows and d:
        strides = (first.stride(0), second.stride(0))
        factors = (a.eps, a.weight_offset, rounds_once(a))
        kernel[(rows,)](first, second, a.weight, d, *strides, *factors, triton.next_power_of_2(d))
