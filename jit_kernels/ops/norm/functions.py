"""The public functions of the norms."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.norm.spec import FUSED_ADD_RMS_NORM, RMS_NORM
from kiln.jit_kernels.ops.shared.shapes import (
    as_rows,
    check_dtype,
    check_shape,
    dense_rows,
    takes_arrays,
)
from kiln.jit_kernels.torch_ops import call


@takes_arrays
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., d].

    weight: [d]. Rows may be strided. The mean is computed in float32, and the normalised row is
    rounded to x's dtype before it is multiplied by the weight. With ``round_once``, as in OLMo-2
    and gpt-oss, only the product is rounded; so it is with ``weight_offset``, such as Gemma's 1,
    which makes the factor weight_offset + weight. A row's bits depend on no other row. If ``out``
    is given, the result is written there and returned; it may be x. Raises ValueError on a wrong
    shape, TypeError on a dtype other than bf16, fp16, fp32. Source:
    https://arxiv.org/abs/1910.07467, and the norms of transformers: LlamaRMSNorm, Olmo2RMSNorm,
    GemmaRMSNorm
    """
    if out is None:
        out = x.new_empty(x.shape)
    check_dtype("rms_norm", x=x, weight=weight, out=out)
    check_shape("rms_norm", "weight", weight, x.shape[-1:])
    check_shape("rms_norm", "out", out, x.shape)
    rows = as_rows(out)
    if rows is None:
        dense = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return out.copy_(rms_norm(x, weight, eps, dense, weight_offset, round_once))
    call(
        RMS_NORM,
        out=rows,
        x=dense_rows(x),
        weight=weight.contiguous(),
        eps=eps,
        weight_offset=weight_offset,
        round_once=round_once,
    )
    return out


@takes_arrays
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_once: bool = False,
) -> None:
    """Add x to residual and write the norm of the sum to x, both in place, in one pass.

    residual += x; x = rms_norm(residual, weight, eps, …), with the same bits as these two
    operations. x and residual: [..., d] of one shape, rows may be strided; weight: [d]. Raises
    ValueError on a wrong shape or if x or residual has no view as rows, TypeError on an unsupported
    dtype.
    """
    check_dtype("fused_add_rms_norm", x=x, residual=residual, weight=weight)
    check_shape("fused_add_rms_norm", "weight", weight, x.shape[-1:])
    check_shape("fused_add_rms_norm", "residual", residual, x.shape)
    rows, sums = as_rows(x), as_rows(residual)
    if rows is None or sums is None:
        raise ValueError(
            f"fused_add_rms_norm works in place and needs dense rows with one row stride; x has "
            f"strides {x.stride()}, residual {residual.stride()}: pass contiguous tensors"
        )
    call(
        FUSED_ADD_RMS_NORM,
        x=rows,
        residual=sums,
        weight=weight.contiguous(),
        eps=eps,
        weight_offset=weight_offset,
        round_once=round_once,
    )
