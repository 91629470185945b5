"""Triton form of the product of a few rows.

A program multiplies all rows with a few outputs, 128 inputs at a time. Rows are masked, not
counted, so the bits of a result do not depend on how many there are. With experts each row has
programs of its own. Codes of 4 bits have no Triton form.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.ops.attention.triton import widen
from kiln.jit_kernels.ops.linear.reference import BLOCK

_FORMATS = ("Plain", "E4M3", "I8")
VARIANTS = {"skinny_gemm": {"weight": _FORMATS, "input": _FORMATS}}
_ROWS = 16  # the fewest that tl.dot multiplies
_OUTPUTS, _OUTPUTS_OF_WIDE, _WIDE = 16, 32, 8192  # of a program; from _WIDE outputs on more
_NATIVE = 89  # the first compute capability with instructions that convert e4m3


@triton.jit
def _values(elements, CODED: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr):
    """Return elements as tl.dot multiplies them; no code is rounded. e4m3 come as bytes."""
    if CODED and elements.dtype == tl.uint8:
        if NATIVE:
            return elements.to(tl.float8e4nv, bitcast=True).to(COMPUTE)
        return widen(elements).to(COMPUTE)
    return elements.to(COMPUTE)


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm(  # noqa: PLR0913
    out, x, weight, x_scales, scales, bias, expert_of, ends, rows, outputs, inputs, out_stride,
    x_stride, weight_stride, x_scale_row, x_scale_column, scale_columns, sharing, num_experts,
    expert_weights, expert_scales, GROUPED: tl.constexpr,
    CODED: tl.constexpr, X_CODED: tl.constexpr, BY_BLOCK: tl.constexpr, BIAS: tl.constexpr,
    NATIVE: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if GROUPED:
        row = tl.program_id(1)
        rows = tl.minimum(row + 1, tl.load(ends + num_experts - 1))
        expert = tl.load(expert_of + row, mask=row < rows, other=0).to(tl.int64)
        weight += expert * expert_weights
        scales += expert * expert_scales
        bias += expert * outputs
    is_row, is_output = m < rows, n < outputs
    own = x + m.to(tl.int64)[:, None] * x_stride
    mine = weight + n.to(tl.int64)[None, :] * weight_stride
    row_scales = x_scales + m.to(tl.int64) * x_scale_row
    output_scales = scales + (n // sharing).to(tl.int64) * scale_columns
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, inputs, STEP):
        k = first + tl.arange(0, STEP)
        a = tl.load(own + k[None, :], mask=is_row[:, None] & (k < inputs)[None, :], other=0)
        b = tl.load(mine + k[:, None], mask=is_output[None, :] & (k < inputs)[:, None], other=0)
        a, b = _values(a, X_CODED, NATIVE, COMPUTE), _values(b, CODED, NATIVE, COMPUTE)
        if BY_BLOCK:
            part = tl.dot(a, b)
            at = first // STEP
            part *= tl.load(output_scales + at, mask=is_output, other=0.0)[None, :]
            if X_CODED:
                part *= tl.load(row_scales + at * x_scale_column, mask=is_row, other=0.0)[:, None]
            sums += part
        else:
            sums = tl.dot(a, b, sums)
    if CODED and not BY_BLOCK:
        sums *= tl.load(output_scales, mask=is_output, other=0.0)[None, :]
        if X_CODED:
            sums *= tl.load(row_scales, mask=is_row, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def skinny_gemm(a: Arguments) -> None:
    """Write x @ weight.T + bias to out [rows, outputs]."""
    if a.out.is_cuda:
        _launch(a, tl.bfloat16 if a.out.dtype == torch.bfloat16 else tl.float16)
        return
    # Triton's interpreter stores bfloat16 as integers and would multiply those, and it rounds down.
    wide = a.out.float()
    _launch(a._replace(out=wide), tl.float32)
    a.out.copy_(wide)


def _launch(a: Arguments, compute: Any) -> None:
    (rows, inputs), outputs, grouped = a.x.shape, a.weight.shape[-2], a.ends is not None
    coded, x_coded = a.scales is not None, a.x_scales is not None
    scales, x_scales = a.scales if coded else a.weight, a.x_scales if x_coded else a.x
    size = _OUTPUTS if outputs < _WIDE else _OUTPUTS_OF_WIDE
    _skinny_gemm[(triton.cdiv(outputs, size), rows if grouped else 1)](
        a.out, _as_bytes(a.x), _as_bytes(a.weight),
        x_scales, scales, a.out if a.bias is None else a.bias,
        *((a.expert_of, a.ends) if grouped else (a.out, a.out)), rows, outputs, inputs,
        a.out.stride(0), a.x.stride(0), a.weight.stride(-2), *x_scales.stride(), scales.shape[-1],
        1 if scales.shape[-2] == outputs else BLOCK, len(a.weight), a.weight.stride(0),
        scales.stride(0),
        GROUPED=grouped, 
        CODED=coded, X_CODED=x_coded, BY_BLOCK=coded and scales.shape[-1] > 1,
        BIAS=a.bias is not None, NATIVE=coded and a.out.is_cuda and _converts_codes(),
        COMPUTE=compute, ROWS=_ROWS, OUTPUTS=size, STEP=BLOCK, num_stages=4,
    )  # fmt: skip


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return e4m3 codes as bytes, because Triton has that dtype on new GPUs alone."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _converts_codes() -> bool:
    return bool(triton.runtime.driver.active.get_current_target().arch >= _NATIVE)
