"""The public functions that multiply many rows with quantised weights."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.quantized_linear.spec import QUANTIZED_GEMM, tile_rows_for
from kiln.jit_kernels.torch_ops import call


def quantized_gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Write x @ weights.T + bias to out [rows, outputs], for any number of rows.

    x: [rows, inputs], with rows that begin at multiples of 16 bytes; bias: [outputs]; both of out's
    dtype, bf16 or fp16. Weights are (code - zero) * scale. A result's bits do not depend on the
    other rows. Codes are

    - uint8 [outputs, padded inputs / 2], packed by ``pack_codes``. scales: [outputs, groups] for
      groups of 32, 64 or 128 padded inputs, or one group of all. If they are float32, codes are
      whole numbers, and ``zeros`` are int16 of the same shape, from 0 to 16; None means 8. If they
      are uint8, they are exponents of 2, plus 127, of groups of 32, and codes are e2m1.
    - float8_e4m3fn or int8 [outputs, inputs], of a multiple of 16 inputs, with rows that begin at
      multiples of 16 bytes. scales: float32 [outputs, 1], or, of float8_e4m3fn, [outputs, inputs /
      128] or more columns. A row for each 128 outputs will do for both.

    Raises ValueError.
    """
    call(
        QUANTIZED_GEMM,
        out=out,
        x=x,
        codes=codes,
        scales=scales,
        zeros=zeros,
        bias=bias,
        ends=None,
        tile_rows=tile_rows_for(len(x), 0),
    )


def grouped_quantized_gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    ends: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> None:
    """Write each row times the weights of its expert to out [rows, outputs].

    The rows of x are sorted by expert, and those of expert e end at ends[e]: int32 [experts], at
    most rows. codes, scales and zeros have experts as their first dimension; all else is as in
    ``quantized_gemm``. Rows behind the last end may hold anything, and out keeps its values there.
    Raises ValueError.
    """
    call(
        QUANTIZED_GEMM,
        out=out,
        x=x,
        codes=codes,
        scales=scales,
        zeros=zeros,
        bias=None,
        ends=ends,
        tile_rows=tile_rows_for(len(x), len(ends)),
    )
