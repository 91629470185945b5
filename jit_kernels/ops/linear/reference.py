"""The reference of skinny_gemm, in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.activation.reference import act_and_mul_reference
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION
from kiln.jit_kernels.ops.dequantize.reference import codes_of, scale_values

BLOCK = 128  # inputs, and outputs, that share a scale, if not all of an output do


def skinny_gemm_reference(a: Arguments) -> Results:
    """X [rows, inputs] @ weight [outputs, inputs].T + bias, with the scales of both.

    With experts each row has weights of its own; rows behind the last end stay as they are.
    """
    wide = torch.float64 if torch.float64 in (a.x.dtype, a.weight.dtype) else torch.float32
    x = _scaled(a.x.to(wide), a.x_scales)
    if a.ends is None:
        y = x @ weights_of(a.weight, a.scales, a.zeros, x).T
        return {"out": (y if a.bias is None else y + a.bias.to(wide)).to(a.out.dtype)}
    out = a.out.clone()
    for row, expert in enumerate(a.expert_of[: int(a.ends[-1])].tolist()):
        scales, zeros = (None if one is None else one[expert] for one in (a.scales, a.zeros))
        y = weights_of(a.weight[expert], scales, zeros, x) @ x[row]
        out[row] = (y if a.bias is None else y + a.bias[expert].to(wide)).to(a.out.dtype)
    return {"out": out}


def gated_reference(activation: str, a: Arguments) -> Results:
    """act(gate) * up, where x @ weight.T + bias has gates in its first half, ups in the other."""
    both = a.out.new_empty(len(a.x), a.weight.shape[-2])
    both = skinny_gemm_reference(a._replace(out=both))["out"]
    gates = BY_ACTIVATION[activation].parameters.Arguments(out=a.out, x=both)
    return act_and_mul_reference(activation, gates)


def weights_of(
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return weights [outputs, inputs] in x's dtype, times their scales; x: [rows, inputs]."""
    if weight.dtype != torch.uint8 or scales is None:
        return _scaled(weight.to(x.dtype), scales)
    codes = codes_of(weight, scales.dtype, 2 * weight.shape[1])
    group = codes.shape[1] // scales.shape[1]
    if scales.dtype != torch.uint8:
        codes = codes - (8 if zeros is None else zeros.repeat_interleave(group, 1))
    values = codes.to(x.dtype) * scale_values(scales).to(x.dtype).repeat_interleave(group, 1)
    return values[:, : x.shape[1]]


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
