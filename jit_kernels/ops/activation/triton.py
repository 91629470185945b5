"""Triton forms of the gated activations."""

from __future__ import annotations

import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments

_BLOCK = 1024


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _act_and_mul(out, x, d, out_stride, x_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < d
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + d + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * _sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # tanh(u) = 2 sigmoid(2u) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * _sigmoid(2.0 * inner)
    y = (gate * up).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, y, mask=mask)


@triton.jit
def _clamped_swiglu(out, x, d, out_stride, x_stride, alpha, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < d
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + d + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up < -limit, -limit, tl.where(up > limit, limit, up))
    y = (gate * _sigmoid(alpha * gate) * (up + 1.0)).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, y, mask=mask)


def silu_and_mul(a: Arguments) -> None:
    """Write silu(x[:, :d]) * x[:, d:] to out."""
    _launch("silu", a)


def gelu_and_mul(a: Arguments) -> None:
    """Write gelu(x[:, :d]) * x[:, d:] to out, the exact GELU."""
    _launch("gelu", a)


def gelu_tanh_and_mul(a: Arguments) -> None:
    """Write gelu(x[:, :d]) * x[:, d:] to out, the tanh GELU."""
    _launch("gelu_tanh", a)


def clamped_swiglu(a: Arguments) -> None:
    """Write gpt-oss's gated activation of x[:, :d] and x[:, d:] to out."""
    rows, d = a.out.shape
    if rows and d:
        strides = (a.out.stride(0), a.x.stride(0))
        _clamped_swiglu[_grid(a)](a.out, a.x, d, *strides, a.alpha, a.limit, _BLOCK)


def _launch(activation: str, a: Arguments) -> None:
    rows, d = a.out.shape
    if rows and d:
        strides = (a.out.stride(0), a.x.stride(0))
        _act_and_mul[_grid(a)](a.out, a.x, d, *strides, activation, _BLOCK)


def _grid(a: Arguments) -> tuple[int, int]:
    rows, d = a.out.shape
    return (rows, triton.cdiv(d, _BLOCK))
