"""The feed-forward layer of a mixture of experts, and torch.ops.kiln.moe within it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GatedMLP
from kiln.engine.layers.opaque import opaque_operator
from kiln.engine.layers.weight import Tensors, Weight
from kiln.engine.layers.weight_parts import weight_of
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.moe.functions import CALLED, route_tokens, sum_of_experts


def _moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: Tensors,
    gate_up_form: str,
    down: Tensors,
    down_form: str,
    top_k: int,
    renormalise: bool,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [num_tokens, hidden].

    x: [num_tokens, hidden]; logits: [num_tokens, num_experts], from the router; tensors and forms
    are Weights'. The work of each expert depends on the data, so this is one opaque operator for
    ``torch.compile``.
    """
    weights, ids = route_tokens(logits, top_k, renormalise=renormalise)
    first, second = weight_of(gate_up_form, gate_up), weight_of(down_form, down)
    return sum_of_experts(x, first.grouped, second.grouped, logits.shape[1], weights, ids)


opaque_operator(
    "moe(Tensor x, Tensor logits, Tensor?[] gate_up, str gate_up_form, Tensor?[] down,"
    " str down_form, int top_k, bool renormalise) -> Tensor",
    _moe,
    fake=lambda x, *others: torch.empty_like(x),
)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that runs on every token, scaled by its sigmoid gate."""

    mlp: GatedMLP
    gate: Linear  # [1, hidden]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """The weighted sum of the experts that the router selects for each token.

    ``gate_up`` is [num_experts, 2 * intermediate, hidden], ``down`` [num_experts, hidden,
    intermediate].
    """

    router: Linear
    gate_up: Weight
    down: Weight
    top_k: int
    renormalise: bool
    shared: SharedExpert | None
    kernels: ClassVar[tuple[KernelSpec, ...]] = CALLED

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        y: torch.Tensor = torch.ops.kiln.moe.default(
            x,
            self.router(x),
            self.gate_up.tensors,
            self.gate_up.form,
            self.down.tensors,
            self.down.form,
            self.top_k,
            self.renormalise,
        )
        return y if self.shared is None else y + self.shared(x)
