"""Inputs of products that are rounded to codes of 8 bits by the layer that computes them.

A product may round its own inputs. But the norm or the activation in front of it can do so with the
same bits: it takes no kernel of its own, and no 16-bit values are written and read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kiln.jit_kernels.ops.quantization.spec import (
    FUSED_ADD_RMS_NORM_QUANT,
    QUANTIZE,
    SILU_AND_MUL_QUANT,
)

ROUNDING_KERNELS = (QUANTIZE, FUSED_ADD_RMS_NORM_QUANT, SILU_AND_MUL_QUANT)
ROUNDED_DTYPE = torch.bfloat16  # of the values; the kernels have variants for no other


class Rounded(NamedTuple):
    """Codes [num_rows, size] that stand for bf16 values, and their scales in float32.

    The shape of ``scales`` is [num_rows, 1] with one per row, [num_rows, size / group] with one per
    group, and [1] with one scale for all rows.
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a product wants its inputs rounded.

    ``dtype``: that of the codes. ``group``: how many values of a row share a scale; 0 means all.
    ``scale`` [1]: a fixed scale for all rows; None means that scales are computed. ``by_column``:
    whether the scales are stored column by column.
    """

    dtype: torch.dtype
    group: int = 0
    scale: torch.Tensor | None = None
    by_column: bool = False

    def of(self, x: torch.Tensor) -> Rounded:
        """Round x [num_rows, size]."""
        rounded = self._room(x, x.shape[1])
        torch.ops.kiln.quantize.default(*rounded, x, self.scale, None, self.group)
        return rounded

    def of_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float,
        round_once: bool,
    ) -> Rounded:
        """Add x to the residual in place, and round the norm of the sum; see StreamNorm."""
        rounded = self._room(x, x.shape[1])
        factors = (eps, weight_offset, round_once)
        torch.ops.kiln.fused_add_rms_norm_quant.default(
            *rounded, residual, x, weight, self.scale, self.group, *factors
        )
        return rounded

    def of_silu(self, both: torch.Tensor) -> Rounded:
        """Round silu(gate) * up, of both [num_rows, 2 * size], gates first."""
        rounded = self._room(both, both.shape[1] // 2)
        torch.ops.kiln.silu_and_mul_quant.default(*rounded, both, self.scale, self.group)
        return rounded

    def _room(self, x: torch.Tensor, size: int) -> Rounded:
        rows = x.shape[0]
        codes = x.new_empty(rows, size, dtype=self.dtype)
        columns = size // self.group if self.group else 1
        if self.scale is not None:
            return Rounded(codes, x.new_empty(1, dtype=torch.float32))
        if self.by_column:
            return Rounded(codes, x.new_empty(columns, rows, dtype=torch.float32).T)
        return Rounded(codes, x.new_empty(rows, columns, dtype=torch.float32))
