"""Where a model's tensors come from: what the builder asks of any source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

Index = tuple[slice, ...]  # a slice for each of the first dimensions, of step 1


class Weights(ABC):
    """A source of tensors by their checkpoint names."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that the source holds a tensor in. Raises ModelError."""

    @abstractmethod
    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Write a tensor of a known ``shape``, or the part at ``index``, into ``out``.

        Values are converted to the dtype of ``out``. Only the part is read where the source can do
        that. Raises ModelError where the source has no such tensor or one of another shape,
        ValueError where ``out`` does not have the part's shape.
        """

    @abstractmethod
    def ignore(self, name: str) -> None:
        """Accept that a tensor may be there though the model does not use it."""

    @abstractmethod
    def finish(self) -> None:
        """Check that nothing was left over, and let go of files. Raises ModelError."""


def check_part(name: str, out: torch.Tensor, shape: Sequence[int], index: Index) -> None:
    """Raise ValueError unless ``out`` has the shape of a tensor's part."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=False)]
    sizes = [len(range(*bound)) for bound in bounds] + list(shape[len(index) :])
    if len(index) > len(shape) or sizes != list(out.shape):
        raise ValueError(
            f"{name}: out is {list(out.shape)}, and {index} of {list(shape)} is {sizes}"
        )
