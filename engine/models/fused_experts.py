"""Checkpoints in which the experts of a layer are one tensor.

    <layer>.experts.gate_up_proj       [num_experts, gate and up outputs, hidden_size]
    <layer>.experts.down_proj          [num_experts, hidden_size, inner size]
    <layer>.experts.gate_up_proj_bias  [num_experts, gate and up outputs], if experts have biases
    <layer>.experts.down_proj_bias     [num_experts, hidden_size]

transformers 5 writes them with ``save_original_format=False``, for every family with its own names
of the layer, "mlp", and of what is in it. Files of Llama-4 and gpt-oss have no others, and swap the
last two dimensions. The biases of gpt-oss are here whatever form its weights have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch

from kiln.engine.models.experts import ExpertNames, Experts, Layout
from kiln.engine.models.weights import Index, Weights

_LAYER = ExpertNames().layer


class _Place(NamedTuple):
    """Where a tensor is stored: ``expert`` None if under a name of its own.

    ``half``: 0 of gate and 1 of up, which share a tensor, None of down.
    """

    name: str
    expert: int | None = None
    half: int | None = None
    swapped: bool = False  # inputs in front of outputs


class FusedExperts(Weights):
    """A source whose tensors have the names of single experts, even if it stores all as one."""

    def __init__(self, source: Weights, experts: Experts) -> None:
        names = experts.names
        self._source = source
        self.random = source.random
        self._count = experts.num_experts
        self._kept: tuple[object, torch.Tensor] | None = None  # what gate and up share
        self._names, self._layout = names, names.layout
        self._halves = {names.gate: 0, names.up: 1, names.down: None}
        matrices = "|".join(map(re.escape, self._halves))
        self._layer = re.compile(rf"(model\.layers\.\d+\.){re.escape(names.layer)}(.+)")
        self._expert = re.compile(rf"experts\.(\d+)\.({matrices})\.(weight|bias)")

    @property
    def names(self) -> Set[str]:
        """The names of all tensors as they are stored."""
        return self._source.names

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that were read so far, and those of all tensors."""
        return self._source.progress

    def module(self, name: str) -> str:
        """Return the stored name of a module; a single expert keeps its own."""
        return self._source.module(name)

    def stored_name(self, name: str) -> str:
        """Return what the files call a tensor, or the one that it is a part of."""
        return self._source.stored_name(self._find(name).name)

    def spellings(self, name: str) -> Sequence[str]:
        """Return what a config may call a module."""
        return self._source.spellings(name)

    def has(self, name: str) -> bool:
        """Whether the source has a tensor, as such or as a part of another."""
        return self._source.has(self._find(name).name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the source. Raises ModelError."""
        return self._source.dtype(self._find(name).name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the source: of all experts. Raises ModelError."""
        return self._source.shape(self._find(name).name)

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Write a tensor, or the part at ``index``, into ``out``. Raises ModelError."""
        place = self._find(name)
        if place.expert is None:
            self._source.fill(place.name, out, shape, index)
            return
        parts = (*index, *(slice(None) for _ in shape[len(index) :]))
        rows, *columns = (
            slice(*part.indices(size)[:2]) for part, size in zip(parts, shape, strict=True)
        )
        outputs, step, first = shape[0], 1, 0
        if place.half is not None:
            outputs *= 2
            step, first = (2, 0) if self._layout.alternating else (1, place.half * shape[0])
        found = slice(first + step * rows.start, first + step * rows.stop)
        whole, where = [outputs, *shape[1:]], [found, *columns]
        if place.swapped:
            whole, where = whole[::-1], where[::-1]
        whole, where = [self._count, *whole], [slice(place.expert, place.expert + 1), *where]
        if step == 1 and not place.swapped:
            self._source.fill(place.name, out[None], whole, tuple(where))
            return
        read = self._block(place, out, whole, tuple(where))
        values = read.T if place.swapped else read
        out.copy_(values[place.half if step == 2 else 0 :: step])

    def _block(
        self, place: _Place, out: torch.Tensor, shape: Sequence[int], index: Index
    ) -> torch.Tensor:
        """Return a part of one expert's tensor; where gate and up alternate, once for both."""
        key = (place.name, index, out.dtype, out.device)
        if self._kept is not None and self._kept[0] == key:
            read = self._kept[1]
            self._kept = None
            return read
        read = out.new_empty([part.stop - part.start for part in index])
        self._source.fill(place.name, read, shape, index)
        if place.half is not None and self._layout.alternating:
            self._kept = key, read[0]
        return read[0]

    def ignore(self, name: str) -> None:
        """Do not report a tensor as left over although the model does not use it."""
        self._source.ignore(self._find(name).name)

    def finish(self) -> None:
        """Check that no tensor is left over, and close files. Raises ModelError."""
        self._source.finish()

    def _find(self, name: str) -> _Place:
        """Return where a tensor is; under its own name if it is nowhere."""
        layer = self._layer.fullmatch(name)
        if layer is None or self._source.has(name):
            return _Place(name)
        start, rest = layer.groups()
        expert = self._expert.fullmatch(rest)
        if expert is None:
            if rest == self._names.choice_bias:
                rest = self._names.raw_choice_bias or rest
            stored = f"{start}{_LAYER}{rest}"
            return _Place(stored if self._source.has(stored) else name)
        index, matrix, kind = expert.groups()
        half, bias = self._halves[matrix], kind == "bias"
        stem = "down_proj" if half is None else "gate_up_proj"
        fused = [
            f"{start}{prefix}experts.{stem}{'_bias' if bias else ''}"
            for prefix in (_LAYER, self._names.layer)
        ]
        found = [one for one in fused if self._source.has(one)]
        if not found and (self.random or self._layout == Layout()):
            return _Place(name)  # made up, or missing where files may have single experts
        stored = (found or fused)[-1]
        return _Place(stored, int(index), half, self._layout.in_out and not bias)
