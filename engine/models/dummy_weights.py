"""Random weights of any architecture, for tests and benchmarks without a checkpoint."""

from __future__ import annotations

import zlib

import torch

from kiln.engine.models.weights import Weights

_STD = 0.02  # what most models start their training from


class DummyWeights(Weights):
    """Normal weights, zero biases, norms of one; a tensor depends on its name and the seed."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._seed = seed

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Draw a tensor."""
        if name.endswith("norm.weight"):
            out.fill_(1)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            generator = torch.Generator(out.device)
            generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
            out.normal_(0, _STD, generator=generator)

    def ignore(self, name: str) -> None:
        """Do nothing: only what is asked for exists."""

    def finish(self) -> None:
        """Do nothing: random weights have no leftovers."""
