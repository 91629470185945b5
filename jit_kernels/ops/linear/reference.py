"""The reference of skinny_gemm, in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results

BLOCK = 128  # inputs, and outputs, that share a scale, if not all of an output do


def skinny_gemm_reference(a: Arguments) -> Results:
    """X [rows, inputs] @ weight [outputs, inputs].T + bias, with the scales of both."""
    wide = torch.float64 if torch.float64 in (a.x.dtype, a.weight.dtype) else torch.float32
    x = _scaled(a.x.to(wide), a.x_scales)
    y = x @ _scaled(a.weight.to(wide), a.scales).T
    return {"out": (y if a.bias is None else y + a.bias.to(wide)).to(a.out.dtype)}


def _scaled(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return values [n, inputs] times scales [n or n / 128, 1 or inputs / 128 or more]."""
    if scales is None:
        return values
    rows, inputs = values.shape
    if len(scales) != rows:
        scales = scales.repeat_interleave(BLOCK, 0)[:rows]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(BLOCK, 1)[:, :inputs]
    return values * scales
