"""Triton forms of the gated activations: same arguments as the operators, written in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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


def _run(activation: str, out: torch.Tensor, x: torch.Tensor) -> None:
    rows, d = out.shape
    if rows and d:
        grid = (rows, triton.cdiv(d, _BLOCK))
        _act_and_mul[grid](out, x, d, out.stride(0), x.stride(0), activation, _BLOCK)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write silu(x[:, :d]) * x[:, d:] to out. x: [rows, 2d], out: [rows, d]."""
    _run("silu", out, x)


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write gelu(x[:, :d]) * x[:, d:] to out, the exact GELU. x: [rows, 2d], out: [rows, d]."""
    _run("gelu", out, x)


def gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write gelu(x[:, :d]) * x[:, d:] to out, the tanh GELU. x: [rows, 2d], out: [rows, d]."""
    _run("gelu_tanh", out, x)
