"""Floats of 4 bits (e2m1) with a power of two for each block of inputs, as MXFP4 has them.

Source: OCP Microscaling Formats (MX) Specification v1.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from kiln.engine.layers.few_rows import Epilogue, describe_product, multiply_experts, multiply_few
from kiln.engine.layers.group_weight import with_zeros_behind
from kiln.engine.layers.many_rows import many_row_product, multiply_many, multiply_many_experts
from kiln.engine.layers.weight import DEQUANTISED, Weight
from kiln.jit_kernels.ops.dequantize.functions import dequantize
from kiln.jit_kernels.ops.shared.four_bits import CHUNK, pack_codes

BLOCK = 32  # inputs
LARGEST_SCALE = 252  # the largest code, 6, is above what float32 holds with a larger one


@dataclass(frozen=True, slots=True)
class MXFP4Weight(Weight):
    """``codes``: [..., out, padded in / 2] uint8, as ``pack_codes`` puts them.

    ``scales``: [..., out, blocks] uint8: s stands for 2**(s - 127). Blocks are of 32 inputs, or
    fewer where a rank has a part of one; inputs are padded to a multiple of 128.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor) -> Self:
        """Return the weights of codes [out, in] of a byte each, and scales [out, blocks]."""
        inputs = codes.shape[1]
        more = -inputs % CHUNK // (inputs // scales.shape[1])
        return cls(pack_codes(codes), F.pad(scales, (0, more)).contiguous())

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.codes.shape[-2]

    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs, which are exact in float32."""
        inputs = 2 * self.codes.shape[-1]
        size = inputs // self.scales.shape[-1]
        return dequantize(self.codes, self.scales, outputs, dtype, inputs, groups=size)

    def activations(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return x with zeros behind, as many inputs as there are codes."""
        return with_zeros_behind(x, 2 * self.codes.shape[-1])

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Multiply x by skinny_gemm, or return False."""
        return multiply_few(self.form, x, self.codes, to, self.scales)

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        if self.multiply_few(x, Epilogue(out, bias)):
            return
        if not multiply_many(x, self.tensors, out, bias):
            Weight.product(self, x, out, bias)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        own = (self.form, rows, self.codes, (experts, ends), rows.dtype, self.scales)
        out = multiply_experts(*own)
        if out is None:
            out = multiply_many_experts(rows, self.tensors, ends)
        return Weight.grouped(self, rows, ends, experts) if out is None else out

    def describe(self) -> str:
        """Say which codes there are."""
        size = 2 * self.codes.shape[-1] // self.scales.shape[-1]
        many = many_row_product(self.codes, DEQUANTISED)
        product = describe_product(self.form, self.codes, many)
        return f"mxfp4, blocks of {size} inputs, {product}"
