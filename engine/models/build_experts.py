"""Build the feed-forward layers with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GatedMLP
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
        experts, names = self.experts, self.experts.names
        prefix += names.layer
        count = experts.num_experts
        inner = self.split.equal(
            experts.intermediate_size,
            f"{prefix}experts",
            "inner elements",
            multiple=_VECTOR // self.parameters.dtype.itemsize,
        )
        places = [f"{prefix}experts.{index}." for index in range(count)]
        pairs = tuple((place + part, inner) for place in places for part in (names.gate, names.up))
        gate_up = Projection(name + "experts.gate_up_proj", pairs, self.hidden)
        downs = tuple((place + names.down, self.hidden) for place in places)
        down = Projection(name + "experts.down_proj", downs, inner)
        return SparseMLP(
            router=self._linear(name + "router", f"{prefix}gate", count),
            gate_up=self.parameters.experts(gate_up, count),
            down=self.parameters.experts(down, count),
            top_k=experts.top_k,
            renormalise=experts.renormalise,
            shared=self._shared(name, prefix) if experts.shared_size else None,
        )

    def _shared(self, name: str, prefix: str) -> SharedExpert:
        size = self.experts.shared_size
        mlp = self.mlp(name + "shared_expert.", prefix + "shared_expert.", size)
        gate = self._linear(name + "shared_expert_gate", f"{prefix}shared_expert_gate", 1)
        return SharedExpert(mlp, gate)

    def _linear(self, name: str, stored: str, outputs: int) -> Linear:
        """Build a projection of which every rank has all outputs."""
        return self.parameters.linear(Projection(name, ((stored, all_of(outputs)),), self.hidden))
