"""Random weights of any architecture, for tests and benchmarks without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from kiln.engine.models.weights import Index, Weights, check_part

_STD = 0.02  # the usual initialization


class DummyWeights(Weights):
    """Normal weights, zero biases, norms of one; a tensor depends on its name and the seed.

    ``dtype`` is the reported dtype; the random values depend on the dtype of ``out``.
    """

    random = True

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self._dtype = dtype

    def has(self, name: str) -> bool:
        """Return False: there is no checkpoint."""
        return False

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype, the same for all tensors."""
        return self._dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Raise KeyError: a tensor has any shape."""
        raise KeyError(name)

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Generate the whole tensor and copy the part, so that a part equals that of the whole."""
        check_part(name, out, shape, index)
        if out.is_meta:  # nothing to fill
            return
        if name.endswith("norm.weight"):
            out.fill_(1)
        elif name.endswith(".bias"):
            out.zero_()
        elif index:
            whole = out.new_empty(tuple(shape))
            self.fill(name, whole, shape)
            out.copy_(whole[index])
        else:
            generator = torch.Generator(out.device)
            generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
            out.normal_(0, _STD, generator=generator)

    def ignore(self, name: str) -> None:
        """Do nothing: only requested tensors exist."""

    def finish(self) -> None:
        """Do nothing: random weights have no leftovers."""
