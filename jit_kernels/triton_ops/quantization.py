"""Triton forms of the kernels that quantise: same arguments as the operators, written in place.

A program takes a row. Codes are made by integer arithmetic: Triton has no conversion to e4m3 before
sm_89, and its interpreter rounds otherwise than its GPU code.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.ops.activation.triton import _sigmoid
from kiln.jit_kernels.ops.norm.triton import _normalise

Given = torch.Tensor | None


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(largest, INT8: tl.constexpr):
    number = 127.0 if INT8 else 448.0
    scale = tl.math.div_rn(largest.to(tl.float32, bitcast=True), tl.zeros_like(largest) + number)
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)


@triton.jit
def _encode(x, INT8: tl.constexpr):
    """Return the codes of x as bytes, rounded to nearest even and saturating."""
    if INT8:
        near = tl.minimum(tl.maximum(x, -128.0), 127.0) + 12582912.0  # 1.5 * 2^23: to an integer
        return tl.where(x == x, near.to(tl.int32, bitcast=True), 0).to(tl.uint8)
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    normal = (a - 0x3C000000 + 0x7FFFF + ((a >> 20) & 1)) >> 20
    small = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(a < 0x3C800000, small, normal)
    code = tl.where(a >= 0x43E00000, 0x7E, code) | ((bits >> 24) & 0x80)
    return tl.where(a > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def _store(  # noqa: PLR0913
    y, row, out, out_scale, given, d, out_stride, scale_stride, group_stride,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    one = tl.zeros((1,), tl.int32)
    columns = tl.arange(0, BLOCK)
    if GIVEN:
        scale = tl.load(given + one)
        tl.store(out_scale + one, scale, mask=row + one == 0)
    elif GROUP:
        groups = tl.arange(0, BLOCK // GROUP)
        largest = tl.max(tl.reshape(_magnitude(y), (BLOCK // GROUP, GROUP)), 1)
        scale = _scale_of(largest, INT8)
        at = out_scale + row * scale_stride + groups * group_stride
        tl.store(at, scale, mask=groups < d // GROUP)
        scale = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,))
    else:
        scale = _scale_of(tl.max(_magnitude(y), 0) + one, INT8)
        tl.store(out_scale + row * scale_stride + one, scale)
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    tl.store(out + row * out_stride + columns, _encode(y * inverse, INT8), mask=columns < d)


@triton.jit
def _quantize(  # noqa: PLR0913
    out, out_scale, x, given, d, out_stride, scale_stride, group_stride, x_stride,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    y = tl.load(x + row * x_stride + columns, mask=columns < d, other=0.0).to(tl.float32)
    _store(y, row, out, out_scale, given, d, out_stride, scale_stride, group_stride,
           GIVEN, GROUP, INT8, BLOCK)  # fmt: skip


@triton.jit
def _norm(  # noqa: PLR0913
    out, out_scale, x, given, d, out_stride, scale_stride, group_stride, x_stride,
    residual, residual_stride, weight, eps, offset, ADD: tl.constexpr, OFFSET: tl.constexpr,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    dtype: tl.constexpr = x.dtype.element_ty
    s = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        sums = residual + row * residual_stride + columns
        total = (s + tl.load(sums, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sums, total, mask=mask)
        s = total.to(tl.float32)
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(s, factor, d, eps, offset, OFFSET, dtype).to(tl.float32)
    _store(y, row, out, out_scale, given, d, out_stride, scale_stride, group_stride,
           GIVEN, GROUP, INT8, BLOCK)  # fmt: skip


@triton.jit
def _silu(  # noqa: PLR0913
    out, out_scale, x, given, d, out_stride, scale_stride, group_stride, x_stride,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + d + columns, mask=mask, other=0.0).to(tl.float32)
    y = (gate * _sigmoid(gate) * up).to(x.dtype.element_ty).to(tl.float32)
    _store(y, row, out, out_scale, given, d, out_stride, scale_stride, group_stride,
           GIVEN, GROUP, INT8, BLOCK)  # fmt: skip


@triton.jit
def _amax(out, x, rows, d, x_stride, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    largest = tl.zeros((BLOCK,), tl.int32)
    row = part.to(tl.int64)
    while row < rows:
        for start in range(0, d, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            some = tl.load(x + row * x_stride + columns, mask=columns < d, other=0.0)
            largest = tl.maximum(largest, _magnitude(some.to(tl.float32)))
        row += tl.num_programs(0)
    one = tl.zeros((1,), tl.int32)
    tl.store(out + part + one, (tl.max(largest, 0) + one).to(tl.float32, bitcast=True))


def _codes(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.uint8)


def _common(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, given: Given, group: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that all kernels begin with, and those that they end with."""
    strides = out_scale.stride() if out_scale.dim() == 2 else (0, 0)
    known = out_scale if given is None else given
    first = [_codes(out), out_scale, x, known, out.shape[1], out.stride(0), *strides, x.stride(0)]
    block = triton.next_power_of_2(max(out.shape[1], group))
    last = {"GIVEN": given is not None, "GROUP": group, "INT8": out.dtype == torch.int8}
    return first, {**last, "BLOCK": block}


def quantize(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, scale: Given, maxima: Given,
    group_size: int,
) -> None:  # fmt: skip
    """Write the codes of x [rows, d] and their scales."""
    if maxima is not None:
        largest = torch.full_like(maxima[:1], 127.0 if out.dtype == torch.int8 else 448.0)
        scale = (maxima.amax().reshape(1) / largest).clamp(min=2.0**-126)
    first, last = _common(out, out_scale, x, scale, group_size)
    if x.numel():
        _quantize[(x.shape[0],)](*first, **last)


def tensor_amax(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write the largest magnitudes of the parts of x [rows, d]; out: [num_parts]."""
    _amax[(out.numel(),)](out, x, *x.shape, x.stride(0), 1024)


def rms_norm_quant(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
    scale: Given, group_size: int, eps: float, weight_offset: float,
) -> None:  # fmt: skip
    """Write the codes and scales of the norm of x [rows, d]; weight: [d]."""
    first, last = _common(out, out_scale, x, scale, group_size)
    more = (x, 0, weight, eps, weight_offset, False, weight_offset != 0)
    if x.numel():
        _norm[(x.shape[0],)](*first, *more, **last)


def fused_add_rms_norm_quant(  # noqa: PLR0913 (the operator's arguments)
    out: torch.Tensor, out_scale: torch.Tensor, residual: torch.Tensor, x: torch.Tensor,
    weight: torch.Tensor, scale: Given, group_size: int, eps: float, weight_offset: float,
) -> None:  # fmt: skip
    """Add x to residual, and write the codes and scales of the norm of the sum. [rows, d] each."""
    first, last = _common(out, out_scale, x, scale, group_size)
    more = (residual, residual.stride(0), weight, eps, weight_offset, True, weight_offset != 0)
    if x.numel():
        _norm[(x.shape[0],)](*first, *more, **last)


def silu_and_mul_quant(
    out: torch.Tensor, out_scale: torch.Tensor, x: torch.Tensor, scale: Given, group_size: int
) -> None:
    """Write the codes and scales of silu(x[:, :d]) * x[:, d:]. x: [rows, 2d]."""
    first, last = _common(out, out_scale, x, scale, group_size)
    if x.numel():
        _silu[(x.shape[0],)](*first, **last)
