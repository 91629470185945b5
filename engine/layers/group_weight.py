"""Integer weights with a scale, and maybe a zero point, for each group of inputs.

w = (code - zero) * scale
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.weight import DEQUANTISED, Weight
from kiln.jit_kernels.ops.dequantize.functions import dequantize


@dataclass(frozen=True, slots=True)
class Group8Weight(Weight):
    """``codes``: [..., out, in] uint8; ``scales``: [..., out, groups] float32.

    ``zeros``: [..., out, groups] int16, zero points that may be one above the largest code; None:
    half of the number of codes. ``group_of``: [..., in] int32, the group of each input, which
    belongs to all outputs; None: groups of neighbours, of equal size.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group_of: torch.Tensor | None = None
    shared = frozenset(("group_of",))
    bits = 8

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.codes.shape[-2]

    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs."""
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros
        inputs = self._inputs
        groups = inputs // self.scales.shape[-1] if self.group_of is None else self.group_of
        return dequantize(self.codes, self.scales, outputs, dtype, inputs, zeros, groups)

    def describe(self) -> str:
        """Say which codes there are."""
        order = "" if self.group_of is None else " in any order"
        groups = self.scales.shape[-1]
        size = self._inputs // groups
        return f"int{self.bits}, groups of {size} inputs{order}, {DEQUANTISED}"

    @property
    def _inputs(self) -> int:
        return self.codes.shape[-1]


@dataclass(frozen=True, slots=True)
class Group4Weight(Group8Weight):
    """The same with codes of 4 bits: [..., out, in / 2]. The even input is in the low bits."""

    bits = 4

    @property
    def _inputs(self) -> int:
        return 2 * self.codes.shape[-1]
