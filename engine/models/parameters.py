"""Creates every Linear and every other parameter of a model.

Code for all projections belongs here: which weight scheme reads each, and wrappers of Linear (by
name).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from kiln.engine.errors import ModelError
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.layers.weight_parts import join
from kiln.engine.models.quantization import Quantization
from kiln.engine.models.rotary_order import Order
from kiln.engine.models.scheme import DENSE, FLOATS, AtLoad, Part, Scheme, fill_shares
from kiln.engine.models.split import Share, all_of
from kiln.engine.models.weights import Weights

_COMPARED_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: one or several linear layers of the checkpoint, stacked along the outputs.

    ``name`` is Kiln's, and unique in a model: "layers.3.qkv_proj". ``parts`` are the checkpoint's
    names, without ".weight", and which of their outputs this rank keeps; ``inputs``: which inputs.
    Several runs of the outputs of one layer are as many parts with its name, next to each other.
    ``order``: of the rank's outputs, if it is not the checkpoint's; they stay within their part.
    """

    name: str
    parts: tuple[tuple[str, Share], ...]
    inputs: Share
    bias: bool = False
    order: Order = ()

    @property
    def role(self) -> str:
        """Its name without that of its layer, such as "qkv_proj"."""
        return self.name.rpartition(".")[2]

    @property
    def output_size(self) -> int:
        """The number of outputs of all parts."""
        return sum(share.room for _, share in self.parts)


class Wrapper(Protocol):
    """May replace each layer by one that computes more, such as what a LoRA adapter adds."""

    def linear(self, projection: Projection, layer: Linear) -> Linear:
        """Return the layer to use for a projection."""

    def embedding(self, name: str, vocabulary: Share, layer: Embedding) -> Embedding:
        """Return the layer to use for an embedding of a share of the vocabulary.

        ``name`` is the checkpoint's.
        """


class Parameters:
    """Creates tensors on one device from a checkpoint of any dtype.

    They have the dtype of the model unless a method is given another. ``wrapper`` None leaves the
    layers as they are.
    """

    def __init__(
        self,
        weights: Weights,
        quantization: Quantization,
        dtype: torch.dtype,
        device: torch.device,
        wrapper: Wrapper | None = None,
    ) -> None:
        self._weights = weights
        self._quantization = quantization
        self.dtype = dtype
        self._device = device
        self._wrapper = wrapper

    def tensor(
        self, name: str, *shape: int | Share, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return one tensor of a known shape, or the rank's share of it. Raises ModelError."""
        shares = [all_of(size) if isinstance(size, int) else size for size in shape]
        out = self._empty(*(share.room for share in shares), dtype=dtype)
        fill_shares(self._weights, name, out, name, shares)
        return out

    def linear(self, projection: Projection, dtype: torch.dtype | None = None) -> Linear:
        """Return a projection. Raises ModelError."""
        parts = self._parts(projection, dtype)
        runs = groupby(parts, lambda part: self._scheme(part.name, projection))
        weight = join([scheme.linear(list(parts)) for scheme, parts in runs])
        bias = self._bias(projection, dtype) if projection.bias else None
        if projection.order:
            weight = weight.reordered(projection.order)
            bias = None if bias is None else bias[list(projection.order)]
        return self._wrapped(projection, Linear.of(weight, bias, dtype or self.dtype))

    def embedding(
        self, name: str, vocabulary: Share, hidden_size: int, twin: str | None = None
    ) -> Embedding:
        """Return the embedding of a name without ".weight". Raises ModelError.

        Behind a share of the vocabulary there is a row of zeros. ``twin`` names a layer with the
        same weight, whose tensor is used if it is the only one of the two. A quantised embedding
        is dequantised.
        """
        rows = vocabulary.room + (vocabulary.size < vocabulary.whole)
        projection = Projection(name, ((name, vocabulary),), all_of(hidden_size))
        scheme = self._scheme(name, projection)
        if scheme != DENSE:
            (part,) = self._parts(projection)
            quantised = scheme.read(part).padded(rows)
            weight = quantised.dequantized(slice(None), self.dtype)[:, :hidden_size].contiguous()
        else:
            weight, stored = self._empty(rows, hidden_size), f"{name}.weight"
            if twin is not None and not self._weights.has(stored):
                stored = f"{twin}.weight" if self._weights.has(f"{twin}.weight") else stored
            shares = (vocabulary, projection.inputs)
            fill_shares(self._weights, stored, weight, name, shares)
        layer = Embedding(weight)
        return layer if self._wrapper is None else self._wrapper.embedding(name, vocabulary, layer)

    def tied(self, projection: Projection, weight: torch.Tensor) -> Linear:
        """Return a projection of one part with the weight [output, input] of another layer.

        If the checkpoint has another weight for it, return a projection with that one.
        """
        ((part, rows),) = projection.parts
        name = f"{part}.weight"
        if self._weights.has(name):
            if self._weights.dtype(name) not in FLOATS:
                raise ModelError(
                    f"{part}: it is tied to the embedding (tie_word_embeddings in config.json), "
                    f"but tensor {self._weights.stored_name(name)} is "
                    f"{self._weights.dtype(name)}: want floats"
                )
            if not self._equals(name, weight, rows):
                return self.linear(projection)
        self._weights.ignore(name)
        return self._wrapped(projection, Linear.of(DenseWeight(weight), None, self.dtype))

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

    def experts(self, projection: Projection, num_experts: int) -> Weight:
        """Return a projection of every expert, [num_experts, output, input]. Raises ModelError.

        ``parts`` lists those of the first expert, then those of the second, and so on.
        """
        parts = list(self._parts(projection))
        first, *others = (self._scheme(part.name, projection) for part in parts)
        for part, scheme in zip(parts[1:], others, strict=True):
            if scheme != first:
                raise ModelError(
                    f"{projection.name}: quantization_config quantises {part.name} otherwise than "
                    f"{parts[0].name}: Kiln wants the same for all experts of a layer"
                )
        try:
            return first.experts(parts, num_experts)
        except ValueError as error:
            raise ModelError(f"{projection.name}: {error}") from error

    def expert_biases(self, projection: Projection, num_experts: int) -> torch.Tensor:
        """Return the biases of every expert, [num_experts, output]; ``parts`` as in ``experts``."""
        return self._bias(projection).view(num_experts, -1)

    def _parts(self, projection: Projection, dtype: torch.dtype | None = None) -> Iterable[Part]:
        for name, share in projection.parts:
            place = (self._weights, projection.name, name, share, projection.inputs)
            yield Part(*place, dtype or self.dtype, self._device, projection.bias)

    def _scheme(self, name: str, projection: Projection) -> Scheme:
        scheme = self._quantization.scheme(name, projection.role, self._weights)
        return AtLoad(scheme) if self._weights.random and scheme != DENSE else scheme

    def _wrapped(self, projection: Projection, layer: Linear) -> Linear:
        return layer if self._wrapper is None else self._wrapper.linear(projection, layer)

    def _bias(self, projection: Projection, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the bias; of partial sums, zeros on all ranks but the first, which adds it."""
        bias = self._empty(projection.output_size, dtype=dtype)
        rows = bias.split([share.room for _, share in projection.parts])
        for (part, share), own in zip(projection.parts, rows, strict=True):
            if projection.inputs.start == 0:
                fill_shares(self._weights, f"{part}.bias", own, projection.name, (share,))
            else:
                self._weights.ignore(f"{part}.bias")
                own.zero_()
        return bias

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
