"""Checkpoints in which the experts of a layer are one tensor.

transformers 5 writes them with ``save_original_format=False``. The names are those of every family:

    mlp.experts.gate_up_proj   [num_experts, gate outputs, then up outputs, hidden_size]
    mlp.experts.down_proj      [num_experts, hidden_size, inner size]
    mlp.gate.weight            [num_experts, hidden_size]: the router
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

import torch

from kiln.engine.models.experts import ExpertNames, Experts
from kiln.engine.models.weights import Index, Weights

_LAYER = ExpertNames().layer


class FusedExperts(Weights):
    """A source whose tensors have the names of single experts, even if it stores all as one."""

    def __init__(self, source: Weights, experts: Experts) -> None:
        names = experts.names
        self._source = source
        self.random = source.random
        self._count = experts.num_experts
        self._names = names
        matrices = "|".join(map(re.escape, (names.gate, names.up, names.down)))
        self._layer = re.compile(rf"(model\.layers\.\d+\.){re.escape(names.layer)}(.+)")
        self._expert = re.compile(rf"experts\.(\d+)\.({matrices})\.weight")

    @property
    def names(self) -> Set[str]:
        """The names of all tensors as they are stored."""
        return self._source.names

    def module(self, name: str) -> str:
        """Return the stored name of a module; a single expert keeps its own."""
        return self._source.module(name)

    def has(self, name: str) -> bool:
        """Whether the source has a tensor, as such or as a part of another."""
        return self._source.has(self._find(name)[0])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the source. Raises ModelError."""
        return self._source.dtype(self._find(name)[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the source: of all experts. Raises ModelError."""
        return self._source.shape(self._find(name)[0])

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Write a tensor, or the part at ``index``, into ``out``. Raises ModelError."""
        stored, expert, matrix = self._find(name)
        if expert is None:
            self._source.fill(stored, out, shape, index)
            return
        outputs, inputs = shape
        first = outputs if matrix == self._names.up else 0
        stacked = outputs if matrix == self._names.down else 2 * outputs
        parts = (*index, *(slice(None) for _ in shape[len(index) :]))
        rows, columns = (
            slice(*part.indices(size)[:2]) for part, size in zip(parts, shape, strict=True)
        )
        place = (slice(expert, expert + 1), slice(first + rows.start, first + rows.stop), columns)
        self._source.fill(stored, out[None], (self._count, stacked, inputs), place)

    def ignore(self, name: str) -> None:
        """Do not report a tensor as left over although the model does not use it."""
        self._source.ignore(self._find(name)[0])

    def finish(self) -> None:
        """Check that no tensor is left over, and close files. Raises ModelError."""
        self._source.finish()

    def _find(self, name: str) -> tuple[str, int | None, str]:
        """Return the stored name of a tensor; of an expert also its index and which matrix."""
        layer = self._layer.fullmatch(name)
        if layer is None or self._source.has(name):
            return name, None, ""
        expert = self._expert.fullmatch(layer[2])
        if expert is None:
            stored = f"{layer[1]}{_LAYER}{layer[2]}"
            return (stored if self._source.has(stored) else name), None, ""
        kind = "down_proj" if expert[2] == self._names.down else "gate_up_proj"
        stored = f"{layer[1]}{_LAYER}experts.{kind}"
        if not self._source.has(stored):
            return name, None, ""
        return stored, int(expert[1]), expert[2]
