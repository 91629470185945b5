"""The projections of a model, found by building it without memory for its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.models.build import Builder
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.parameters import Projection, Wrapper
from kiln.engine.models.weights import Index


def list_projections(family: Family, config: HFConfig) -> list[Projection]:
    """Return every projection that a wrapper of layers gets, in the order of their building.

    Those of experts are not among them. Raises ModelError.
    """
    found = _Found()
    build_without_weights(family, config, found)
    return found.projections


def build_without_weights(family: Family, config: HFConfig, wrapper: Wrapper) -> None:
    """Build a model on the meta device, so that ``wrapper`` gets its layers. Raises ModelError."""
    place, weights = torch.device("meta"), _NoWeights(config.dtype)
    builder = Builder(config, weights, 1, config.dtype, place, wrapper)
    family.build(builder, lambda done: None)


class _Found:
    """Keeps the projections, and leaves the layers as they are."""

    def __init__(self) -> None:
        self.projections: list[Projection] = []

    def linear(self, projection: Projection, layer: Linear) -> Linear:
        """Keep a projection."""
        self.projections.append(projection)
        return layer

    def embedding(self, name: str, layer: Embedding) -> Embedding:
        """Return the layer."""
        return layer


class _NoWeights(DummyWeights):
    """Has every tensor, and fills none: for models on the meta device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(0, dtype)

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Do nothing."""
