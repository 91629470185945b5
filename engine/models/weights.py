"""Where a model's tensors come from: what the decoder asks of any source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Weights(ABC):
    """A source of tensors by their checkpoint names, in the dtype and on the device to serve."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    @abstractmethod
    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write the tensor of a name into ``out``. Raises ModelError on another shape."""

    @abstractmethod
    def ignore(self, name: str) -> None:
        """Accept that a tensor may be there though the model does not use it."""

    @abstractmethod
    def finish(self) -> None:
        """Check that nothing was left over, and let go of files. Raises ModelError."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor of a known shape. Raises ModelError."""
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.fill(name, out)
        return out

    def stacked(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> torch.Tensor:
        """Return several tensors in one, below each other: [sum(rows), *rest].

        Raises ModelError.
        """
        out = torch.empty((sum(rows), *rest), dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(out, list(rows)), strict=True):
            self.fill(name, part)
        return out
