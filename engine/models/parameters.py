"""Creates every Linear and every other parameter of a model.

Code for all projections belongs here: sharding (an index for ``Weights.fill``), the layout of
quantized weights (by their dtype in the checkpoint), and wrappers of Linear (by name).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kiln.engine.errors import ModelError
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.models.weights import Weights

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: one or several linear layers of the checkpoint, stacked along the outputs.

    ``name`` is Kiln's, and unique in a model: "layers.3.qkv_proj". ``parts`` are the checkpoint's
    names, without ".weight", and their numbers of outputs.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    input_size: int
    bias: bool = False

    @property
    def output_size(self) -> int:
        """The number of outputs of all parts."""
        return sum(size for _, size in self.parts)


class Wrapper(Protocol):
    """May replace each layer by one that computes more, such as what a LoRA adapter adds."""

    def linear(self, projection: Projection, layer: Linear) -> Linear:
        """Return the layer to use for a projection."""

    def embedding(self, name: str, layer: Embedding) -> Embedding:
        """Return the layer to use for an embedding; ``name`` is the checkpoint's."""


class Parameters:
    """Creates tensors of one dtype on one device from a checkpoint of any dtype.

    ``wrapper`` None leaves the layers as they are.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        wrapper: Wrapper | None = None,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._wrapper = wrapper

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor of a known shape. Raises ModelError."""
        out = self._empty(*shape)
        self._fill(name, out, name)
        return out

    def linear(self, projection: Projection) -> Linear:
        """Return a projection. Raises ModelError."""
        weight = self._stacked(projection, "weight", projection.input_size)
        bias = self._stacked(projection, "bias") if projection.bias else None
        return self._wrapped(projection, Linear(weight, bias))

    def embedding(self, name: str, *shape: int) -> Embedding:
        """Return the embedding of a name without ".weight". Raises ModelError."""
        layer = Embedding(self.tensor(f"{name}.weight", *shape))
        return layer if self._wrapper is None else self._wrapper.embedding(name, layer)

    def tied(self, projection: Projection, weight: torch.Tensor) -> Linear:
        """Return a projection with the weight [output, input] of another layer."""
        for part, _ in projection.parts:
            self._weights.ignore(f"{part}.weight")
        return self._wrapped(projection, Linear(weight))

    def experts(self, projection: Projection, num_experts: int) -> torch.Tensor:
        """Return a projection of every expert, [num_experts, output, input]. Raises ModelError.

        ``parts`` lists those of the first expert, then those of the second, and so on.
        """
        weight = self._stacked(projection, "weight", projection.input_size)
        return weight.view(num_experts, -1, projection.input_size)

    def _wrapped(self, projection: Projection, layer: Linear) -> Linear:
        return layer if self._wrapper is None else self._wrapper.linear(projection, layer)

    def _stacked(self, projection: Projection, kind: str, *rest: int) -> torch.Tensor:
        out = self._empty(projection.output_size, *rest)
        rows = out.split([size for _, size in projection.parts])
        for (part, _), own in zip(projection.parts, rows, strict=True):
            self._fill(f"{part}.{kind}", own, projection.name)
        return out

    def _fill(self, name: str, out: torch.Tensor, layer: str) -> None:
        dtype = self._weights.dtype(name)
        if dtype not in _FLOATS:
            raise ModelError(
                f"{layer}: tensor {name} is {dtype}, Kiln supports only unquantized checkpoints: "
                f"want one of {', '.join(map(str, _FLOATS))}"
            )
        self._weights.fill(name, out, out.shape)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
