"""Integer weights with a scale, and maybe a zero point, for each group of inputs.

w = (code - zero) * scale
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kiln.engine.layers.weight import DEQUANTISED, Weight


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
        """Return the weights of some outputs.

        The difference of two codes is exact in 16 bits, so that only the product is rounded.
        """
        codes = self._unpacked(self.codes[..., outputs, :])
        zeros = self.zeros
        if zeros is None:
            difference = codes.to(dtype) - 2 ** (self.bits - 1)
        else:
            difference = self._by_group(codes.to(dtype), zeros[..., outputs, :], torch.sub)
        return self._by_group(difference, self.scales[..., outputs, :], torch.mul)

    def describe(self) -> str:
        """Say which codes there are."""
        order = "" if self.group_of is None else " in any order"
        groups = self.scales.shape[-1]
        size = self._inputs // groups
        return f"int{self.bits}, groups of {size} inputs{order}, {DEQUANTISED}"

    @property
    def _inputs(self) -> int:
        return self.codes.shape[-1]

    def _unpacked(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes [..., in] of one byte each."""
        return codes

    def _by_group(
        self, values: torch.Tensor, of_groups: torch.Tensor, operation: Callable[..., Any]
    ) -> torch.Tensor:
        """Apply an operation to values [..., in] and what belongs to their groups, in float32."""
        out = torch.empty_like(values)
        if self.group_of is None:
            shape = (*of_groups.shape, -1)
            operation(values.view(shape), of_groups.unsqueeze(-1), out=out.view(shape))
            return out
        index = self.group_of.long().unsqueeze(-2)
        operation(values, of_groups.take_along_dim(index, -1), out=out)
        return out


@dataclass(frozen=True, slots=True)
class Group4Weight(Group8Weight):
    """The same with codes of 4 bits: [..., out, in / 2]. The even input is in the low bits."""

    bits = 4

    @property
    def _inputs(self) -> int:
        return 2 * self.codes.shape[-1]

    def _unpacked(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes [..., in] of one byte each."""
        return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
