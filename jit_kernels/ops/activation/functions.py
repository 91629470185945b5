"""The public functions of the gated activations."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION, CLAMPED_SWIGLU
from kiln.jit_kernels.ops.shared.shapes import (
    as_rows,
    check_dtype,
    check_shape,
    dense_rows,
    takes_arrays,
)
from kiln.jit_kernels.torch_ops import call


@takes_arrays
def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(x[..., :d]) * x[..., d:] for x [..., 2d], [..., d], rounded once.

    Rows may be strided. If ``out`` is given, the result is written there and returned. Raises
    ValueError on an odd last dimension or a wrong ``out``, TypeError on a dtype other than bf16,
    fp16, fp32.
    """
    return _gated(BY_ACTIVATION["silu"], x, out)


@takes_arrays
def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(x[..., :d]) * x[..., d:] with the exact (erf) GELU; else like silu_and_mul."""
    return _gated(BY_ACTIVATION["gelu"], x, out)


@takes_arrays
def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(x[..., :d]) * x[..., d:] with the tanh GELU; else like silu_and_mul."""
    return _gated(BY_ACTIVATION["gelu_tanh"], x, out)


@takes_arrays
def clamped_swiglu(
    x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return g * sigmoid(alpha * g) * (u + 1), the activation of gpt-oss; else like silu_and_mul.

    g = min(x[..., :d], limit); u = x[..., d:] clamped to [-limit, limit].
    Source: https://arxiv.org/abs/2508.10925 section 2.2
    """
    return _gated(CLAMPED_SWIGLU, x, out, alpha=alpha, limit=limit)


def _gated(
    spec: KernelSpec, x: torch.Tensor, out: torch.Tensor | None, **numbers: float
) -> torch.Tensor:
    function = spec.name
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{function}: x is {list(x.shape)}, want an even last dimension")
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if out is None:
        out = x.new_empty(shape)
    check_dtype(function, x=x, out=out)
    check_shape(function, "out", out, shape)
    rows = as_rows(out)
    if rows is None:
        rows = torch.empty(shape, dtype=x.dtype, device=x.device).view(-1, shape[-1])
        call(spec, out=rows, x=dense_rows(x), **numbers)
        return out.copy_(rows.view(shape))
    call(spec, out=rows, x=dense_rows(x), **numbers)
    return out
