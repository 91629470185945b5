"""The interface of a weight source, such as a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set

import torch

Index = tuple[slice, ...]  # slices of step 1, one per leading dimension


class Weights(ABC):
    """A source of tensors, addressed by their checkpoint names.

    ``random``: it makes up float tensors of any name and shape, and has no others.
    """

    random = False

    @property
    def names(self) -> Set[str]:
        """The names of all tensors as they are stored; none if the source makes them up."""
        return frozenset()

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that were read so far, and those of all tensors; 0 if it makes them up."""
        return 0, 0

    def module(self, name: str) -> str:
        """Return the stored name of a module, which is another where a source renames tensors."""
        return name

    def stored_name(self, name: str) -> str:
        """Return what the files call a tensor, for errors."""
        return name

    def spellings(self, name: str) -> Sequence[str]:
        """Return what a config may call a module, its stored name first."""
        return (self.module(name),)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether a checkpoint has a tensor that not every checkpoint has."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the source. Raises ModelError."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the source. Raises ModelError."""

    @abstractmethod
    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Write a tensor of a known ``shape``, or the part at ``index``, into ``out``.

        Values are converted to the dtype of ``out``. If possible, only the part is read. On a GPU
        the copy may still run when this returns: what follows on the current stream comes after it.
        Raises ModelError if the tensor is missing or has another shape, ValueError if ``out`` does
        not have the part's shape.
        """

    @abstractmethod
    def ignore(self, name: str) -> None:
        """Do not report a tensor as left over although the model does not use it."""

    @abstractmethod
    def finish(self) -> None:
        """Check that no tensor is left over, and close files. Raises ModelError."""


def check_part(name: str, out: torch.Tensor, shape: Sequence[int], index: Index) -> None:
    """Raise ValueError unless ``out`` has the shape of a tensor's part."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=False)]
    sizes = [len(range(*bound)) for bound in bounds] + list(shape[len(index) :])
    if len(index) > len(shape) or sizes != list(out.shape):
        raise ValueError(
            f"{name}: out is {list(out.shape)}, but {index} of {list(shape)} is {sizes}"
        )
