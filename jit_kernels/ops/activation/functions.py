"""The public functions of the gated activations."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION
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
    return _act_and_mul("silu", x, out)


@takes_arrays
def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(x[..., :d]) * x[..., d:] with the exact (erf) GELU; else like silu_and_mul."""
    return _act_and_mul("gelu", x, out)


@takes_arrays
def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(x[..., :d]) * x[..., d:] with the tanh GELU; else like silu_and_mul."""
    return _act_and_mul("gelu_tanh", x, out)


def _act_and_mul(activation: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    function = f"{activation}_and_mul"
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{function}: x is {list(x.shape)}, want an even last dimension")
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if out is None:
        out = x.new_empty(shape)
    check_dtype(function, x=x, out=out)
    check_shape(function, "out", out, shape)
    spec = BY_ACTIVATION[activation]
    rows = as_rows(out)
    if rows is None:
        rows = torch.empty(shape, dtype=x.dtype, device=x.device).view(-1, shape[-1])
        call(spec, out=rows, x=dense_rows(x))
        return out.copy_(rows.view(shape))
    call(spec, out=rows, x=dense_rows(x))
    return out
