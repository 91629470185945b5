"""Floats of 4 bits (e2m1) with a power of two for each block of inputs, as MXFP4 has them.

Source: OCP Microscaling Formats (MX) Specification v1.0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.weight import DEQUANTISED, Weight

BLOCK = 32  # inputs
LARGEST_SCALE = 252  # the largest code, 6, is above what float32 holds with a larger one
_SMALLEST = 1 << 22  # the bits of 2**-127 in float32, which is subnormal


@dataclass(frozen=True, slots=True)
class MXFP4Weight(Weight):
    """``codes``: [..., out, in / 2] uint8, the even input in the low bits.

    ``scales``: [..., out, blocks] uint8: s stands for 2**(s - 127). Blocks are of 32 inputs, or
    fewer where a rank has a part of one.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.codes.shape[-2]

    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs, which are exact in float32."""
        codes = self.codes[..., outputs, :]
        values = values_of(torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2))
        scales = powers_of_two(self.scales[..., outputs, :]).unsqueeze(-1)
        blocks = values.view(*scales.shape[:-1], -1)
        return (blocks * scales).flatten(-2).to(dtype)

    def describe(self) -> str:
        """Say which codes there are."""
        size = 2 * self.codes.shape[-1] // self.scales.shape[-1]
        return f"mxfp4, blocks of {size} inputs, {DEQUANTISED}"


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes 0 to 15, uint8, as float32; 0 to 7 are 0 .5 1 1.5 2 3 4 6."""
    size = codes & 7
    exponent = (size >> 1).clamp(min=1) - 1
    halves = torch.where(size < 2, size, (size & 1 | 2) << exponent).to(torch.int8)
    return torch.where(codes < 8, halves, -halves).float() * 0.5


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Return 2**(s - 127) of scales s, uint8, as float32, by the bits of its exponent."""
    bits = scales.int() << 23
    return torch.where(scales == 0, _SMALLEST, bits).view(torch.float32)
