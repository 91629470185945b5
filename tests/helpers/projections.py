"""Projections that one process has whole, for tests."""

from __future__ import annotations

from kiln.engine.models.parameters import Projection
from kiln.engine.models.split import all_of


def whole_projection(name: str, outputs: dict[str, int], inputs: int) -> Projection:
    """Return a projection of parts with these numbers of outputs."""
    parts = tuple((part, all_of(size)) for part, size in outputs.items())
    return Projection(name, parts, all_of(inputs))
