"""The distinct products of a model, and weights of each with random contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import load_model
from kiln.engine.models.parameters import Parameters, Projection
from kiln.engine.models.quantization import UNQUANTIZED
from kiln.engine.models.scheme import DENSE, Scheme
from kiln.engine.models.split import Share, Split

_META = torch.device("meta")
_SEED = 0
_Looks = tuple[bool, int, tuple[tuple[Scheme, int], ...]]  # is it tied, inputs, parts


@dataclass(frozen=True, slots=True)
class ModelProduct:
    """Projections of a model whose weights have the same form and sizes on a rank.

    ``roles``: their names without those of their layers, such as "qkv_proj". ``projection`` is one
    of them. ``is_tied``: its weights are the floats of the embedding.
    """

    roles: tuple[str, ...]
    projection: Projection
    is_tied: bool

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return self.projection.inputs.room

    def weights(self, config: HFConfig, dtype: torch.dtype, device: torch.device) -> list[Weight]:
        """Return weights with random contents: several if parts of the outputs differ in form."""
        source, projection = DummyWeights(_SEED, dtype), replace(self.projection, bias=False)
        quantization = UNQUANTIZED if self.is_tied else config.quantization
        parameters = Parameters(source, quantization, dtype, device)
        weight = parameters.linear(projection).weight
        parts: tuple[Weight, ...] = getattr(weight, "parts", (weight,))
        return list(parts)


def products_of(
    family: Family, config: HFConfig, dtype: torch.dtype, split: Split
) -> list[ModelProduct]:
    """Return the products of a rank in the order of the model. Raises ModelError and ConfigError.

    Left out are experts, whose products are grouped, and projections in float32.
    """
    listing, weights = _Listing(config, dtype), DummyWeights(_SEED, dtype)
    floats = replace(config, quantization=UNQUANTIZED)
    load_model(family, floats, weights, 1, dtype, _META, wrapper=listing, split=split)
    return [
        ModelProduct(tuple(dict.fromkeys(one.role for one in same)), same[0], is_tied)
        for (is_tied, _, _), same in listing.found.items()
    ]


@dataclass
class _Listing:
    """Sees every projection of a model, and sorts them by what their weights look like."""

    config: HFConfig
    dtype: torch.dtype
    found: dict[_Looks, list[Projection]] = field(default_factory=dict)

    def linear(self, projection: Projection, layer: Linear) -> Linear:
        """Note a projection."""
        if isinstance(layer.weight, DenseWeight) and layer.weight.dtype == self.dtype:
            is_tied = projection.role == "lm_head" and self.config.tie_word_embeddings
            parts = tuple(self._sizes(projection, is_tied))
            key = (is_tied, projection.inputs.room, parts)
            self.found.setdefault(key, []).append(projection)
        return layer

    def embedding(self, name: str, vocabulary: Share, layer: Embedding) -> Embedding:
        """Leave an embedding as it is."""
        return layer

    def _sizes(self, projection: Projection, is_tied: bool) -> Iterator[tuple[Scheme, int]]:
        """Yield scheme and outputs of the parts; neighbours of one scheme are one."""
        source, quantization = DummyWeights(_SEED, self.dtype), self.config.quantization

        def scheme_of(part: tuple[str, Share]) -> Scheme:
            return DENSE if is_tied else quantization.scheme(part[0], projection.role, source)

        for scheme, parts in groupby(projection.parts, scheme_of):
            yield scheme, sum(share.room for _, share in parts)
