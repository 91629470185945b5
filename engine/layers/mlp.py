"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kiln.engine.layers.linear import Linear
from kiln.jit_kernels.ops.activation.functions import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul

GATES = MappingProxyType(
    {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
)  # by the name that config.json's hidden_act uses


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(gate(x) * up(x)) with gate and up in one projection [2 * intermediate, hidden]."""

    gate_up: Linear
    gate: Callable[[torch.Tensor], torch.Tensor]  # [..., 2 * intermediate] -> [..., intermediate]
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        return self.down(self.gate(self.gate_up(x)))
