"""Integer weights with a scale, and maybe a zero point, for each group of inputs.

w = (code - zero) * scale
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from kiln.engine.layers.few_rows import Epilogue, describe_product, multiply_experts, multiply_few
from kiln.engine.layers.many_rows import many_row_product, multiply_many, multiply_many_experts
from kiln.engine.layers.weight import DEQUANTISED, Weight
from kiln.jit_kernels.ops.dequantize.functions import dequantize
from kiln.jit_kernels.ops.shared.four_bits import CHUNK, pack_codes


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
        return f"int{self.bits}, groups of {size} inputs{order}, {self._product_name}"

    @property
    def _inputs(self) -> int:
        return self.codes.shape[-1]

    @property
    def _product_name(self) -> str:
        return DEQUANTISED


@dataclass(frozen=True, slots=True)
class Group4Weight(Group8Weight):
    """The same with codes of 4 bits, [..., out, padded in / 2] as ``pack_codes`` puts them.

    Inputs are padded to a multiple of 128, and scales and zero points have columns for those too.
    Groups are of a divisor of 128 inputs, of all of them, or in any order.
    """

    bits = 4

    @classmethod
    def of(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group_of: torch.Tensor | None,
    ) -> Self:
        """Return the weights of codes [out, in] of a byte each, and the other fields for these."""
        inputs, columns = codes.shape[1], scales.shape[1]
        behind = -inputs % CHUNK
        if group_of is not None:  # x is 0 there: any group will do
            group_of = F.pad(group_of, (0, behind))
        elif columns > 1 or behind:  # a scale of 0 makes the weights behind 0
            own = math.gcd(inputs // columns, CHUNK)
            repeats, more = inputs // columns // own, behind // own
            scales = F.pad(scales.repeat_interleave(repeats, 1), (0, more))
            if zeros is not None:
                zeros = F.pad(zeros.repeat_interleave(repeats, 1), (0, more))
        zeros = None if zeros is None else zeros.contiguous()
        return cls(pack_codes(codes), scales.contiguous(), zeros, group_of)

    def activations(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return x with zeros behind, as many inputs as there are codes."""
        return with_zeros_behind(x, self._inputs)

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Multiply x by skinny_gemm, or return False."""
        if self.group_of is not None:
            return False
        return multiply_few(self.form, x, self.codes, to, self.scales, zeros=self.zeros)

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        if self.multiply_few(x, Epilogue(out, bias)):
            return
        if self.group_of is not None or not multiply_many(x, self.tensors[:3], out, bias):
            Weight.product(self, x, out, bias)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        if self.group_of is None:
            own = (self.form, rows, self.codes, (experts, ends), rows.dtype, self.scales)
            out = multiply_experts(*own, zeros=self.zeros)
            if out is None:
                out = multiply_many_experts(rows, self.tensors[:3], ends)
            if out is not None:
                return out
        return Weight.grouped(self, rows, ends, experts)

    @property
    def _inputs(self) -> int:
        return 2 * self.codes.shape[-1]

    @property
    def _product_name(self) -> str:
        if self.group_of is not None:
            return DEQUANTISED
        return describe_product(self.form, self.codes, many_row_product(self.codes, DEQUANTISED))


def with_zeros_behind(x: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return x [num_rows, in] with zeros behind: [num_rows, inputs]."""
    more = inputs - x.shape[1]
    return F.pad(x, (0, more)) if more else x
