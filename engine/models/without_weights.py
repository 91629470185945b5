"""Build a model without memory for its weights, to find its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.engine.models.build import Builder
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.parameters import Wrapper
from kiln.engine.models.weights import Index


def build_without_weights(family: Family, config: HFConfig, wrapper: Wrapper) -> None:
    """Build a model on the meta device, so that ``wrapper`` gets its layers. Raises ModelError."""
    place, weights = torch.device("meta"), _NoWeights(config.dtype)
    builder = Builder(config, weights, 1, config.dtype, place, wrapper)
    family.build(builder, lambda done: None)


class _NoWeights(DummyWeights):
    """Has every tensor, and fills none: for models on the meta device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(0, dtype)

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Do nothing."""
