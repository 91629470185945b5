"""The feed-forward layer of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GatedMLP
from kiln.jit_kernels.ops.moe.functions import moe_experts, route_tokens


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token goes through, as far as its gate is open."""

    mlp: GatedMLP
    gate: Linear  # [1, hidden]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """The weighted sum of the experts that the router chooses for a token.

    ``gate_up`` is [num_experts, 2 * intermediate, hidden], ``down`` [num_experts, hidden,
    intermediate].
    """

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int
    renormalise: bool
    shared: SharedExpert | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        weights, ids = route_tokens(self.router(x), self.top_k, renormalise=self.renormalise)
        y = moe_experts(x, self.gate_up, self.down, weights, ids)
        return y if self.shared is None else y + self.shared(x)
