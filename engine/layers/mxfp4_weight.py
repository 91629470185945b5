"""Floats of 4 bits (e2m1) with a power of two for each block of inputs, as MXFP4 has them.

Source: OCP Microscaling Formats (MX) Specification v1.0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.weight import DEQUANTISED, Weight
from kiln.jit_kernels.ops.dequantize.functions import dequantize

BLOCK = 32  # inputs
LARGEST_SCALE = 252  # the largest code, 6, is above what float32 holds with a larger one


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
        inputs = 2 * self.codes.shape[-1]
        size = inputs // self.scales.shape[-1]
        return dequantize(self.codes, self.scales, outputs, dtype, inputs, groups=size)

    def describe(self) -> str:
        """Say which codes there are."""
        size = 2 * self.codes.shape[-1] // self.scales.shape[-1]
        return f"mxfp4, blocks of {size} inputs, {DEQUANTISED}"
