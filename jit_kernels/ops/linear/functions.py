"""The public functions that multiply a few rows with weights."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.linear.checks import tiles_for
from kiln.jit_kernels.ops.linear.spec import GATED, SKINNY_GEMM
from kiln.jit_kernels.torch_ops import call


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    x_scales: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    of_experts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write x @ weight.T + bias to out [rows, outputs], for 1 to 16 rows, or any with experts.

    x: [rows, inputs], weight: [outputs, inputs], bias: [outputs], all of out's dtype, bf16 or fp16.
    Or weight, and x too, are codes float8_e4m3fn. Then scales are float32 [outputs, 1] and
    x_scales [rows, 1]; or, with one for each 128 inputs, scales [outputs, inputs / 128] or
    [outputs / 128, inputs / 128], rounded up, with any columns behind, and x_scales [rows, inputs /
    128]. Or weight, and x too, are int8, with scales [outputs, 1] and x_scales [rows, 1]. Or weight
    is of 4 bits, uint8 [outputs, padded inputs / 2] as ``pack_codes`` gives it, with scales
    [outputs, groups] of 32, 64, 128 or all of the padded inputs: float32 of integers, with zero
    points ``zeros`` int16 of the same shape, or None: 8; uint8 of e2m1, exponents of 2, plus 127.
    ``of_experts``: (experts [rows], ends [num_experts]) int32: rows are sorted by expert, and those
    of expert e end at ends[e]. Then all but x, x_scales and out have a dimension of experts in
    front, and rows behind the last end are left as they are. A result's bits do not depend on the
    other rows. Raises ValueError.
    """
    expert_of, ends = of_experts or (None, None)
    call(
        SKINNY_GEMM,
        out=out,
        x=x,
        weight=weight,
        x_scales=x_scales,
        scales=scales,
        zeros=zeros,
        bias=bias,
        expert_of=expert_of,
        ends=ends,
        tiles=tiles_for(len(x), 0 if ends is None else len(ends)),
    )


def skinny_gemm_and_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    activation: str = "silu",
    *,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Write act(gate) * up to out [rows, outputs], where gate, up = (x @ weight.T + bias).chunk(2).

    weight: [2 * outputs, inputs], gates first. ``activation``: silu or gelu_tanh. Gate and up are
    rounded to out's dtype first, so the bits are those of ``skinny_gemm`` and then
    ``silu_and_mul`` or ``gelu_tanh_and_mul``. x is not rounded, and there are no experts.
    Everything else is as in ``skinny_gemm``. Raises ValueError.
    """
    if activation not in GATED:
        raise ValueError(f"activation {activation!r}: want one of {', '.join(GATED)}")
    call(
        GATED[activation],
        out=out,
        x=x,
        weight=weight,
        x_scales=None,
        scales=scales,
        zeros=zeros,
        bias=bias,
        expert_of=None,
        ends=None,
        tiles=tiles_for(len(x), 0),
    )
