"""Checkpoints whose tensors have other names than Kiln asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set

import torch

from kiln.engine.models.weights import Index, Weights

_SUFFIXES = ("weight", "weight_packed", "qweight", "weight_scale", "weight_blocks")


class RenamedWeights(Weights):
    """A source that looks up each tensor under the name that it is stored under."""

    def __init__(self, source: Weights) -> None:
        self._source = source
        self.random = source.random

    @abstractmethod
    def stored(self, name: str) -> Sequence[str]:
        """Return the names that a tensor may have in the source, the usual one last."""

    @property
    def names(self) -> Set[str]:
        """The names of all tensors as they are stored."""
        return self._source.names

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that were read so far, and those of all tensors."""
        return self._source.progress

    def module(self, name: str) -> str:
        """Return the stored name of a module."""
        for place in self.stored(name):
            if any(self._source.has(f"{place}.{suffix}") for suffix in _SUFFIXES):
                return self._source.module(place)
        return self._source.module(name)

    def stored_name(self, name: str) -> str:
        """Return what the files call a tensor."""
        return self._source.stored_name(self._find(name))

    def spellings(self, name: str) -> Sequence[str]:
        """Return what a config may call a module: it may be of another version than the files."""
        return list(dict.fromkeys((self.module(name), *self.stored(name), name)))

    def has(self, name: str) -> bool:
        """Whether the source has a tensor."""
        return any(map(self._source.has, self.stored(name)))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the source. Raises ModelError."""
        return self._source.dtype(self._find(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the source. Raises ModelError."""
        return self._source.shape(self._find(name))

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Write a tensor, or the part at ``index``, into ``out``. Raises ModelError."""
        self._source.fill(self._find(name), out, shape, index)

    def ignore(self, name: str) -> None:
        """Do not report a tensor as left over although the model does not use it."""
        self._source.ignore(self._find(name))

    def finish(self) -> None:
        """Check that no tensor is left over, and close files. Raises ModelError."""
        self._source.finish()

    def _find(self, name: str) -> str:
        places = self.stored(name)
        found = next(filter(self._source.has, places), None)
        return self._likely(places) if found is None else found

    def _likely(self, places: Sequence[str]) -> str:
        """Return the one of the names whose beginning the stored tensors have, or the last."""
        beginnings = {name.partition(".")[0] for name in self.names}
        return next((one for one in places if one.partition(".")[0] in beginnings), places[-1])


class HeadlessWeights(RenamedWeights):
    """A source without a head, whose tensors have the names of a model with one.

    transformers' ``AutoModel`` writes ``layers.0.mlp.up_proj.weight`` where a model with a head has
    ``model.layers.0.mlp.up_proj.weight``.
    """

    _HEAD = "lm_head.weight"

    def __init__(self, source: Weights) -> None:
        super().__init__(source)
        source.ignore(self._HEAD)

    def stored(self, name: str) -> Sequence[str]:
        """Return the short name, or the long one."""
        return [name.removeprefix("model."), name]

    def spellings(self, name: str) -> Sequence[str]:
        """Return the stored name alone: the config was written with the same model."""
        return [self.module(name)]

    def has(self, name: str) -> bool:
        """Whether the source has a tensor; never the head."""
        return name != self._HEAD and super().has(name)


class TextWeights(RenamedWeights):
    """The text model in the checkpoint of a model of texts and images, and nothing else of it.

    Released files have ``language_model.model.layers.0…`` and ``language_model.lm_head.weight``, or
    ``model.language_model.layers.0…`` and ``lm_head.weight``.
    """

    _INSIDE, _BEHIND = "language_model.", "model.language_model."

    def __init__(self, source: Weights) -> None:
        super().__init__(source)
        older = f"{self._INSIDE}model."
        self._is_older = any(name.startswith(older) for name in source.names)
        for name in source.names:
            if not name.startswith((self._INSIDE, self._BEHIND, "lm_head.")):
                source.ignore(name)

    def stored(self, name: str) -> Sequence[str]:
        """Return the names under which released files have a tensor, this file's own last."""
        inner = name.removeprefix("model.")
        newer = name if inner == name else self._BEHIND + inner
        return [newer, self._INSIDE + name] if self._is_older else [self._INSIDE + name, newer]
