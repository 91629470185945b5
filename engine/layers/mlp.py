"""The feed-forward layer, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from kiln.engine.layers.linear import Linear
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION

GATES = MappingProxyType(
    {
        "silu": BY_ACTIVATION["silu"],
        "gelu": BY_ACTIVATION["gelu"],
        "gelu_pytorch_tanh": BY_ACTIVATION["gelu_tanh"],
    }
)  # the kernels by hidden_act of config.json

PLAIN = MappingProxyType(
    {
        "relu2": lambda x: F.relu(x).square(),
        "relu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
    }
)  # of layers without a gate, by the same name


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(gate(x) * up(x)) with gate and up in one projection [2 * intermediate, hidden]."""

    gate_up: Linear
    gate: Callable[[torch.Tensor, torch.Tensor], None]  # out [n, d], x [n, 2 * d]
    down: Linear

    @property
    def kernels(self) -> list[KernelSpec]:
        """The kernels that the layer calls itself."""
        return [spec for spec in GATES.values() if spec.operator == self.gate]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        both = self.gate_up(x)
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        self.gate(out, both)
        return self.down(out)


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(activation(up(x))), without a gate. ``activation`` is a key of PLAIN."""

    up: Linear
    activation: str
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        return self.down(PLAIN[self.activation](self.up(x)))
