"""Creates every Linear and every other parameter of a model.

Code for all projections belongs here: the rank's share of each (an index for ``Weights.fill``), the
layout of quantized weights (by their dtype in the checkpoint), and wrappers of Linear (by name).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kiln.engine.errors import ModelError
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.models.split import Share, all_of
from kiln.engine.models.weights import Weights

_COMPARED_ROWS = 1024
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: one or several linear layers of the checkpoint, stacked along the outputs.

    ``name`` is Kiln's, and unique in a model: "layers.3.qkv_proj". ``parts`` are the checkpoint's
    names, without ".weight", and which of their outputs this rank keeps; ``inputs``: which inputs.
    """

    name: str
    parts: tuple[tuple[str, Share], ...]
    inputs: Share
    bias: bool = False

    @property
    def output_size(self) -> int:
        """The number of outputs of all parts."""
        return sum(share.room for _, share in self.parts)


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
        self._fill(name, out, name, [all_of(size) for size in shape])
        return out

    def linear(self, projection: Projection) -> Linear:
        """Return a projection. Raises ModelError."""
        weight = self._stacked(projection, "weight", projection.inputs)
        bias = self._bias(projection) if projection.bias else None
        return self._wrapped(projection, Linear(weight, bias))

    def embedding(
        self, name: str, vocabulary: Share, hidden_size: int, twin: str | None = None
    ) -> Embedding:
        """Return the embedding of a name without ".weight". Raises ModelError.

        Behind a share of the vocabulary there is a row of zeros. ``twin`` names a layer with the
        same weight, whose tensor is used if it is the only one of the two.
        """
        rows = vocabulary.room + (vocabulary.size < vocabulary.whole)
        weight, stored = self._empty(rows, hidden_size), f"{name}.weight"
        if twin is not None and not self._weights.has(stored):
            stored = f"{twin}.weight" if self._weights.has(f"{twin}.weight") else stored
        self._fill(stored, weight, name, (vocabulary, all_of(hidden_size)))
        layer = Embedding(weight)
        return layer if self._wrapper is None else self._wrapper.embedding(name, layer)

    def tied(self, projection: Projection, weight: torch.Tensor) -> Linear:
        """Return a projection of one part with the weight [output, input] of another layer.

        If the checkpoint has another weight for it, return a projection with that one.
        """
        ((part, rows),) = projection.parts
        name = f"{part}.weight"
        if self._weights.has(name) and not self._equals(name, weight, rows):
            return self.linear(projection)
        self._weights.ignore(name)
        return self._wrapped(projection, Linear(weight))

    def _equals(self, name: str, weight: torch.Tensor, rows: Share) -> bool:
        """Whether the rank's rows of a tensor equal ``weight``; reads few at a time, for memory."""
        inputs = weight.shape[1]
        for start in range(0, rows.size, _COMPARED_ROWS):
            ours = weight[start : min(start + _COMPARED_ROWS, rows.size)]
            theirs = self._empty(*ours.shape)
            first = rows.start + start
            place = (slice(first, first + len(ours)), slice(inputs))
            self._weights.fill(name, theirs, (rows.whole, inputs), place)
            if not torch.equal(ours, theirs):
                return False
        return True

    def experts(self, projection: Projection, num_experts: int) -> torch.Tensor:
        """Return a projection of every expert, [num_experts, output, input]. Raises ModelError.

        ``parts`` lists those of the first expert, then those of the second, and so on.
        """
        weight = self._stacked(projection, "weight", projection.inputs)
        return weight.view(num_experts, -1, projection.inputs.room)

    def _wrapped(self, projection: Projection, layer: Linear) -> Linear:
        return layer if self._wrapper is None else self._wrapper.linear(projection, layer)

    def _bias(self, projection: Projection) -> torch.Tensor:
        """Return the bias; of partial sums, zeros on all ranks but the first, which adds it."""
        if projection.inputs.start == 0:
            return self._stacked(projection, "bias")
        for part, _ in projection.parts:
            self._weights.ignore(f"{part}.bias")
        return self._empty(projection.output_size).zero_()

    def _stacked(self, projection: Projection, kind: str, *rest: Share) -> torch.Tensor:
        out = self._empty(projection.output_size, *(share.room for share in rest))
        rows = out.split([share.room for _, share in projection.parts])
        for (part, share), own in zip(projection.parts, rows, strict=True):
            self._fill(f"{part}.{kind}", own, projection.name, (share, *rest))
        return out

    def _fill(self, name: str, out: torch.Tensor, layer: str, shares: Sequence[Share]) -> None:
        """Write the rank's share of a tensor to the first elements of ``out``, and zeros behind."""
        dtype = self._weights.dtype(name)
        if dtype not in _FLOATS:
            raise ModelError(
                f"{layer}: tensor {name} is {dtype}, Kiln supports only unquantized checkpoints: "
                f"want one of {', '.join(map(str, _FLOATS))}"
            )
        shape = [share.whole for share in shares]
        sizes = [share.size for share in shares]
        if list(out.shape) != sizes:
            out.zero_()
        if 0 in sizes and 0 not in shape:  # the last ranks may have no token of a small vocabulary
            self._weights.ignore(name)
            return
        index = () if sizes == shape else tuple(share.place for share in shares)
        self._weights.fill(name, out[tuple(slice(size) for size in sizes)], shape, index)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
