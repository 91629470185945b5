"""Projections that one process has whole, for tests."""

from __future__ import annotations

import torch

from kiln.engine.layers.linear import Linear
from kiln.engine.layers.weight import DenseWeight
from kiln.engine.models.parameters import Projection
from kiln.engine.models.split import all_of


def whole_projection(name: str, outputs: dict[str, int], inputs: int) -> Projection:
    """Return a projection of parts with these numbers of outputs."""
    parts = tuple((part, all_of(size)) for part, size in outputs.items())
    return Projection(name, parts, all_of(inputs))


def dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return a projection with float weights [out, in]."""
    return Linear(DenseWeight(weight), bias)
