"""Build the feed-forward layers with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kiln.engine.layers.mlp import GatedMLP
from kiln.engine.layers.router import Router
from kiln.engine.layers.sparse_mlp import SharedExpert, SparseMLP
from kiln.engine.models.experts import Experts
from kiln.engine.models.parameters import Parameters, Projection
from kiln.engine.models.split import Share, Split, all_of

_VECTOR = 16  # bytes: grouped products need rows at multiples of it


@dataclass(frozen=True, slots=True)
class ExpertBuilder:
    """Builds the layers with experts; methods raise ModelError, and ConfigError as Split does.

    ``hidden``: the model's hidden size. ``mlp`` builds the shared expert, from Kiln's name, the
    checkpoint's prefix and the intermediate size.
    """

    experts: Experts
    hidden: Share
    parameters: Parameters
    split: Split
    mlp: Callable[[str, str, int], GatedMLP]

    def layer(self, name: str, prefix: str) -> SparseMLP:
        """Build the layer with Kiln's ``name``, whose tensors' names begin with ``prefix``."""
        experts, make = self.experts, self.parameters
        prefix += experts.names.layer
        gate_up, down = self._projections(name, prefix)
        gate_up_bias = down_bias = None
        if experts.biases:
            gate_up_bias = make.expert_biases(gate_up, experts.num_experts)
            down_bias = make.expert_biases(down, experts.num_experts)
        return SparseMLP(
            self._router(name, prefix),
            make.experts(gate_up, experts.num_experts),
            make.experts(down, experts.num_experts),
            gate_up_bias,
            down_bias,
            experts.activation,
            experts.weighs_inputs,
            self._shared(name, prefix) if experts.shared_size else None,
        )

    def _projections(self, name: str, prefix: str) -> tuple[Projection, Projection]:
        """Return gate and up, and down, of all experts."""
        experts, names = self.experts, self.experts.names
        inner = self.split.equal(
            experts.intermediate_size,
            f"{prefix}experts",
            "inner elements",
            multiple=_VECTOR // self.parameters.dtype.itemsize,
        )
        places = [f"{prefix}experts.{index}." for index in range(experts.num_experts)]
        pairs = tuple((place + part, inner) for place in places for part in (names.gate, names.up))
        downs = tuple((place + names.down, self.hidden) for place in places)
        name, bias = f"{name}experts.", experts.biases
        return (
            Projection(f"{name}gate_up_proj", pairs, self.hidden, bias),
            Projection(f"{name}down_proj", downs, inner, bias),
        )

    def _router(self, name: str, prefix: str) -> Router:
        experts, names = self.experts, self.experts.names
        bias, dtype = None, torch.float32 if experts.router_in_float32 else None
        if experts.choice_bias:
            stored, shape = prefix + names.choice_bias, experts.choice_bias
            bias = self.parameters.tensor(stored, *shape, dtype=torch.float32).flatten()
        parts = ((prefix + names.router, all_of(experts.num_experts)),)
        projection = Projection(name + "router", parts, self.hidden, experts.router_bias)
        return Router(
            self.parameters.linear(projection, dtype),
            experts.routing,
            bias,
            experts.router_in_float32,
        )

    def _shared(self, name: str, prefix: str) -> SharedExpert:
        experts, names = self.experts, self.experts.names
        mlp = self.mlp(f"{name}shared_expert.", f"{prefix}{names.shared}.", experts.shared_size)
        if not experts.shared_gate:
            return SharedExpert(mlp, None)
        parts = ((prefix + names.shared_gate, all_of(1)),)
        projection = Projection(f"{name}shared_expert_gate", parts, self.hidden)
        return SharedExpert(mlp, self.parameters.linear(projection))
