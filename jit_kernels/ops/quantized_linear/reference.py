"""The reference of quantized_gemm, in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import largest_error
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.dequantize.reference import codes_of, scale_values
from kiln.jit_kernels.ops.shared.four_bits import unpack_codes

PLAIN_ZERO = 8  # the zero point of all codes of 4 bits, if none is given
BLOCK = 128  # inputs of a block of 8-bit codes that has a scale, and outputs


def quantized_gemm_reference(a: Arguments) -> Results:
    """X [rows, inputs] @ weights.T + bias; weights [outputs, inputs] are those of the row's expert.

    Rows behind those of the last expert keep their values.
    """
    wide = torch.float64 if torch.float64 in (a.x.dtype, a.scales.dtype) else torch.float32
    x = a.x.to(wide)
    if a.ends is None:
        y = x @ _weights(a, None, wide).T
        return {"out": (y if a.bias is None else y + a.bias.to(wide)).to(a.out.dtype)}
    out = a.out.clone()
    row = torch.arange(len(x), dtype=torch.int32, device=x.device)
    expert_of = torch.searchsorted(a.ends, row, right=True)
    for expert in range(len(a.codes)):
        y = x @ _weights(a, expert, wide).T
        out = torch.where((expert_of == expert).unsqueeze(1), y.to(out.dtype), out)
    return {"out": out}


def _weights(a: Arguments, expert: int | None, wide: torch.dtype) -> torch.Tensor:
    """Return the weights [outputs, inputs] of all, or of an expert."""
    codes, scales, zeros = (
        one if expert is None or one is None else one[expert]
        for one in (a.codes, a.scales, a.zeros)
    )
    if codes.dtype != torch.uint8:
        plain: torch.Tensor = codes.to(wide)
        return plain * _of_blocks(scales.to(wide), *codes.shape)
    unpacked = unpack_codes(codes)
    padded, inputs = unpacked.shape[1], a.x.shape[1]
    values = codes_of(unpacked, scales.dtype, padded)
    repeated = padded // scales.shape[1]
    if zeros is not None:
        values = values - zeros.repeat_interleave(repeated, 1)
    elif scales.dtype != torch.uint8:
        values = values - PLAIN_ZERO
    scaled = values.to(wide) * scale_values(scales).repeat_interleave(repeated, 1).to(wide)
    return scaled[:, :inputs]


def _of_blocks(scales: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Return the scale of each weight, or a column of those that all inputs share."""
    if len(scales) != outputs:
        scales = scales.repeat_interleave(BLOCK, 0)[:outputs]
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(BLOCK, 1)[:, :inputs]


def error_but_for_rows_behind(a: Arguments, wanted: Results) -> float:
    """Return the largest error; rows behind the last expert's agree if they still are NaN."""
    got, want = a.out, wanted["out"]
    if a.ends is not None:
        behind = torch.arange(len(got), device=got.device) >= a.ends[-1]
        kept = behind.unsqueeze(1) & got.isnan() & want.isnan()
        got, want = got.masked_fill(kept, 0.0), want.masked_fill(kept, 0.0)
    return largest_error(got, want)
