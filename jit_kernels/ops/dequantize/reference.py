"""The reference of dequantize, in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.shared.four_bits import unpack_codes

ROW_BLOCK = 128  # rows that share a scale, if not each has its own


def dequantize_reference(a: Arguments) -> Results:
    """[experts, all_rows, d] codes -> [experts, rows, d]: (code - zero) * scale in float32."""
    _, rows, d = a.out.shape
    last, columns = a.first + rows, _columns(a, d)
    scales = _of_rows(a.scales, a.codes.shape[1], a.first, last).take_along_dim(columns, -1)
    values = codes_of(a.codes[:, a.first : last], a.scales.dtype, d)
    if a.zeros is not None:
        zeros = _of_rows(a.zeros, a.codes.shape[1], a.first, last)
        values = values - zeros.take_along_dim(columns, -1)
    elif a.zero:
        values = values - a.zero
    return {"out": (values * scale_values(scales)).to(a.out.dtype)}


def codes_of(codes: torch.Tensor, scale_dtype: torch.dtype, d: int) -> torch.Tensor:
    """Return codes [.., d] as float32; those of 4 bits are as ``pack_codes`` puts them."""
    if codes.dtype == torch.uint8 and codes.shape[-1] != d:
        codes = unpack_codes(codes)
    if scale_dtype != torch.uint8:
        return codes.float()
    return _e2m1(codes.int())


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return floats of 1 bit of sign, 2 of exponent and 1 of fraction, 0 to 6.

    A table, or a number of Python's in torch.where, would be copied to the device, which a graph
    cannot capture.
    """
    exponent, fraction = codes >> 1 & 3, codes & 1
    twice = torch.where(exponent > 0, (2 + fraction) << (exponent - 1).clamp(min=0), fraction)
    return twice * (0.5 - (codes >> 3 & 1))


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; bytes are exponents of 2, plus 127."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)


def _columns(a: Arguments, d: int) -> torch.Tensor:
    """Return the column of scales of each input, int64 [experts or 1, 1, d]."""
    if a.group_of is not None:
        order: torch.Tensor = a.group_of
        return order.long().unsqueeze(1)
    size: int = a.group_size
    return (torch.arange(d, device=a.codes.device) // size).view(1, 1, d)


def _of_rows(kept: torch.Tensor, all_rows: int, first: int, last: int) -> torch.Tensor:
    """Return scales or zero points with a row for each of some rows."""
    if kept.shape[1] == all_rows:
        return kept[:, first:last]
    rows = torch.arange(first, last, device=kept.device) // ROW_BLOCK
    chosen: torch.Tensor = kept.index_select(1, rows)
    return chosen
