"""Triton form of the rotary embedding."""

from __future__ import annotations

import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments


@triton.jit
def _rotate(x, cos_sin_table, positions, stride, head_stride, half, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < half
    row = cos_sin_table + tl.load(positions + token) * 2 * half
    cosines = tl.load(row + columns, mask=mask, other=0.0)
    sines = tl.load(row + half + columns, mask=mask, other=0.0)
    head = x + token * stride + tl.program_id(1).to(tl.int64) * head_stride
    a = tl.load(head + columns, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(head + half + columns, mask=mask, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    tl.store(head + columns, (a * cosines - b * sines).to(dtype), mask=mask)
    tl.store(head + half + columns, (b * cosines + a * sines).to(dtype), mask=mask)


def apply_rotary(a: Arguments) -> None:
    """Rotate query and key by their positions' angles."""
    half = a.cos_sin_table.shape[1] // 2
    block = triton.next_power_of_2(half)
    for x in (a.query, a.key):
        tokens, heads, _ = x.shape
        if tokens and heads:
            strides = (x.stride(0), x.stride(1))
            _rotate[tokens, heads](x, a.cos_sin_table, a.positions, *strides, half, block)
