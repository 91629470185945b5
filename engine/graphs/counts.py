"""What the graphs were used for. It needs no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class GraphCounts:
    """How often a graph of a size was replayed, and why steps ran without one.

    A size that loses its graph counts once when it does, and once for each step that would fit.
    ``captured`` graphs took ``seconds`` and ``num_bytes`` of device memory; checking them, nothing.
    """

    captured: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    replays: Counter[str] = field(default_factory=Counter)  # by rows
    fallbacks: Counter[str] = field(default_factory=Counter)  # by reason
