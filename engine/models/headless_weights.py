"""Checkpoints of models that end at the hidden states: without a head, and with shorter names.

transformers' ``AutoModel`` writes ``layers.0.mlp.up_proj.weight`` where a model with a head has
``model.layers.0.mlp.up_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from kiln.engine.models.weights import Index, Weights

_PREFIX, _HEAD = "model.", "lm_head.weight"


class HeadlessWeights(Weights):
    """A source without a head, whose tensors have the names of a model with one."""

    def __init__(self, source: Weights) -> None:
        self._source = source
        self.random = source.random
        source.ignore(_HEAD)

    @property
    def names(self) -> Set[str]:
        """The names of all tensors as they are stored."""
        return self._source.names

    def module(self, name: str) -> str:
        """Return the stored name of a module."""
        short = name.removeprefix(_PREFIX)
        weights = (f"{short}.weight", f"{short}.weight_packed", f"{short}.qweight")
        return self._source.module(short if any(map(self._source.has, weights)) else name)

    def has(self, name: str) -> bool:
        """Whether the source has a tensor; never the head."""
        return name != _HEAD and self._source.has(self._stored(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the source. Raises ModelError."""
        return self._source.dtype(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the source. Raises ModelError."""
        return self._source.shape(self._stored(name))

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Write a tensor, or the part at ``index``, into ``out``. Raises ModelError."""
        self._source.fill(self._stored(name), out, shape, index)

    def ignore(self, name: str) -> None:
        """Do not report a tensor as left over although the model does not use it."""
        self._source.ignore(self._stored(name))

    def finish(self) -> None:
        """Check that no tensor is left over, and close files. Raises ModelError."""
        self._source.finish()

    def _stored(self, name: str) -> str:
        short = name.removeprefix(_PREFIX)
        return short if self._source.has(short) else name
