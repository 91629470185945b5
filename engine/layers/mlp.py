"""The feed-forward layer, gated or not."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from kiln.engine.layers.linear import Linear
from kiln.engine.layers.rounding import Rounded, Rounding
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION
from kiln.jit_kernels.ops.linear.spec import GATED

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
    """down(act(gate(x)) * up(x)) with gate and up in one projection [2 * intermediate, hidden].

    ``activation`` is a key of GATES. ``rounding``: how silu rounds its results for the last
    product; None: not at all.
    """

    gate_up: Linear
    activation: str
    down: Linear
    rounding: Rounding | None = None

    @property
    def kernels(self) -> list[KernelSpec]:
        """The kernels that the layer calls itself; few_rows says where it calls the second one."""
        gate = GATES[self.activation]
        (name,) = gate.params["activation"]
        return [gate, *([GATED[name]] if name in GATED else ())]

    def __call__(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        if self.rounding is not None:
            return self.down(self.rounding.of_silu(self.gate_up(x)))
        return self.down(self.gate_up.gated(x, GATES[self.activation]))


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(activation(up(x))), without a gate. ``activation`` is a key of PLAIN."""

    up: Linear
    activation: str
    down: Linear

    def __call__(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        return self.down(PLAIN[self.activation](self.up(x)))
