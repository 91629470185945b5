"""The gated activations in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def act_and_mul_reference(activation: str, a: Arguments) -> Results:
    """[rows, 2d] -> [rows, d], in float32 (float64 on float64 inputs), rounded once."""
    wide = a.x if a.x.dtype == torch.float64 else a.x.float()
    gate, up = wide.chunk(2, dim=-1)
    return {"out": (ACTIVATIONS[activation](gate) * up).to(a.x.dtype)}


def clamped_swiglu_reference(a: Arguments) -> Results:
    """[rows, 2d] -> [rows, d], in float32 (float64 on float64 inputs), rounded once."""
    wide = a.x if a.x.dtype == torch.float64 else a.x.float()
    gate, up = wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    return {"out": (gate * torch.sigmoid(a.alpha * gate) * (up + 1)).to(a.x.dtype)}
