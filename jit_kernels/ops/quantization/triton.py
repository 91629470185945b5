"""Triton forms of the kernels that quantise.

One program per row. Codes are computed with integers: Triton has no conversion to e4m3 before
sm_89, and its interpreter does not round as its GPU code does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.ops.activation.triton import _sigmoid
from kiln.jit_kernels.ops.norm.factors import rounds_once
from kiln.jit_kernels.ops.norm.triton import _normalise


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
    y, row, out, scales, scale, d, out_stride, scale_stride, group_stride,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    one = tl.zeros((1,), tl.int32)
    columns = tl.arange(0, BLOCK)
    if GIVEN:
        used = tl.load(scale + one)
        tl.store(scales + one, used, mask=row + one == 0)
    elif GROUP:
        groups = tl.arange(0, BLOCK // GROUP)
        largest = tl.max(tl.reshape(_magnitude(y), (BLOCK // GROUP, GROUP)), 1)
        used = _scale_of(largest, INT8)
        at = scales + row * scale_stride + groups * group_stride
        tl.store(at, used, mask=groups < d // GROUP)
        used = tl.reshape(tl.broadcast_to(used[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,))
    else:
        used = _scale_of(tl.max(_magnitude(y), 0) + one, INT8)
        tl.store(scales + row * scale_stride + one, used)
    inverse = tl.math.div_rn(tl.full(used.shape, 1.0, tl.float32), used)
    tl.store(out + row * out_stride + columns, _encode(y * inverse, INT8), mask=columns < d)


@triton.jit
def _quantize(  # noqa: PLR0913
    out, scales, x, scale, d, out_stride, scale_stride, group_stride, x_stride,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    y = tl.load(x + row * x_stride + columns, mask=columns < d, other=0.0).to(tl.float32)
    _store(y, row, out, scales, scale, d, out_stride, scale_stride, group_stride,
           GIVEN, GROUP, INT8, BLOCK)  # fmt: skip


@triton.jit
def _norm(  # noqa: PLR0913
    out, scales, x, scale, d, out_stride, scale_stride, group_stride, x_stride,
    residual, residual_stride, weight, eps, weight_offset, ADD: tl.constexpr, ONCE: tl.constexpr,
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
    y = _normalise(s, factor, d, eps, weight_offset, ONCE, dtype).to(tl.float32)
    _store(y, row, out, scales, scale, d, out_stride, scale_stride, group_stride,
           GIVEN, GROUP, INT8, BLOCK)  # fmt: skip


@triton.jit
def _silu(  # noqa: PLR0913
    out, scales, x, scale, d, out_stride, scale_stride, group_stride, x_stride,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + d + columns, mask=mask, other=0.0).to(tl.float32)
    y = (gate * _sigmoid(gate) * up).to(x.dtype.element_ty).to(tl.float32)
    _store(y, row, out, scales, scale, d, out_stride, scale_stride, group_stride,
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


def _launch(kernel: Any, a: Arguments, *more: Any) -> None:
    """Launch a kernel with the common arguments, ``more``, and the common constants."""
    strides = a.scales.stride() if a.scales.dim() == 2 else (0, 0)
    scale = a.scales if a.scale is None else a.scale
    rows, d = a.out.shape
    if a.x.numel():
        kernel[(rows,)](
            a.out.view(torch.uint8), a.scales, a.x, scale, d, a.out.stride(0), *strides,
            a.x.stride(0), *more, GIVEN=a.scale is not None, GROUP=a.group_size,
            INT8=a.out.dtype == torch.int8,
            BLOCK=triton.next_power_of_2(max(d, a.group_size)),
        )  # fmt: skip


def quantize(a: Arguments) -> None:
    """Write the codes of x [rows, d] and their scales."""
    if a.maxima is not None:
        largest = torch.full_like(a.maxima[:1], 127.0 if a.out.dtype == torch.int8 else 448.0)
        a = a._replace(scale=(a.maxima.amax().reshape(1) / largest).clamp(min=2.0**-126))
    _launch(_quantize, a)


def tensor_amax(a: Arguments) -> None:
    """Write the largest magnitudes of the parts of x [rows, d]; out: [num_parts]."""
    _amax[(a.out.numel(),)](a.out, a.x, *a.x.shape, a.x.stride(0), 1024)


def rms_norm_quant(a: Arguments) -> None:
    """Write the codes and scales of the norm of x [rows, d]; weight: [d]."""
    _launch(_norm, a, a.x, 0, a.weight, a.eps, a.weight_offset, False, rounds_once(a))


def fused_add_rms_norm_quant(a: Arguments) -> None:
    """Add x to residual, and write the codes and scales of the norm of the sum. [rows, d] each."""
    sums, factors = a.residual, (a.weight, a.eps, a.weight_offset)
    _launch(_norm, a, sums, sums.stride(0), *factors, True, rounds_once(a))


def silu_and_mul_quant(a: Arguments) -> None:
    """Write the codes and scales of silu(x[:, :d]) * x[:, d:]. x: [rows, 2d]."""
    _launch(_silu, a)
