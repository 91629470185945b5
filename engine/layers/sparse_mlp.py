"""The feed-forward layer of a mixture of experts, and torch.ops.kiln.moe within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.engine.layers.activation import Activation
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GatedMLP
from kiln.engine.layers.opaque import opaque_operator
from kiln.engine.layers.router import Router
from kiln.engine.layers.weight import Tensors, Weight
from kiln.engine.layers.weight_parts import weight_of
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.moe.functions import CALLED, sum_of_experts, with_bias


def _moe(  # noqa: PLR0913 (see SparseMLP)
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Tensors,
    gate_up_form: str,
    gate_up_bias: torch.Tensor | None,
    down: Tensors,
    down_form: str,
    down_bias: torch.Tensor | None,
    num_experts: int,
    activation: str,
    numbers: Sequence[float],
    weighs_inputs: bool,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [num_tokens, hidden].

    x: [num_tokens, hidden]; weights, ids: [num_tokens, top_k], from the router; tensors and forms
    are Weights'; biases are [num_experts, outputs]. The work of each expert depends on the data, so
    this is one opaque operator for ``torch.compile``.
    """
    first = with_bias(weight_of(gate_up_form, gate_up).grouped, gate_up_bias)
    second = with_bias(weight_of(down_form, down).grouped, down_bias)
    middle = Activation(activation, tuple(numbers))
    return sum_of_experts(
        x, first, second, num_experts, weights, ids, middle, weighs_inputs=weighs_inputs
    )


opaque_operator(
    "moe(Tensor x, Tensor weights, Tensor ids, Tensor?[] gate_up, str gate_up_form,"
    " Tensor? gate_up_bias, Tensor?[] down, str down_form, Tensor? down_bias, int num_experts,"
    " str activation, float[] numbers, bool weighs_inputs) -> Tensor",
    _moe,
    fake=lambda x, *others: torch.empty_like(x),
)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that runs on every token, scaled by its sigmoid gate if it has one."""

    mlp: GatedMLP
    gate: Linear | None  # hidden to 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        y = self.mlp(x)
        return y if self.gate is None else torch.sigmoid(self.gate(x)) * y


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """The weighted sum of the experts that the router selects for each token.

    ``gate_up`` is [num_experts, 2 * intermediate, hidden], ``down`` [num_experts, hidden,
    intermediate], their biases [num_experts, outputs]. The router's weights multiply what an expert
    returns or, with ``weighs_inputs``, what it gets.
    """

    router: Router
    gate_up: Weight
    down: Weight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: Activation = Activation()
    weighs_inputs: bool = False
    shared: SharedExpert | None = None

    @property
    def kernels(self) -> list[KernelSpec]:
        """The kernels that the layer calls itself."""
        return [*CALLED, self.activation.kernel]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, hidden_size] to the same shape."""
        weights, ids = self.router(x)
        y: torch.Tensor = torch.ops.kiln.moe.default(
            x,
            weights,
            ids,
            self.gate_up.tensors,
            self.gate_up.form,
            self.gate_up_bias,
            self.down.tensors,
            self.down.form,
            self.down_bias,
            self.router.linear.weight.out_features,
            self.activation.name,
            self.activation.numbers,
            self.weighs_inputs,
        )
        return y if self.shared is None else y + self.shared(x)
