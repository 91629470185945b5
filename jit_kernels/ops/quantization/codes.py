"""Codes and scales: the arithmetic shared by the quantisation kernels, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch

GROUP = 128  # elements that share a scale in per-group quantisation
# int8 first: tests that use only the first variant call torch.library.opcheck, which lacks fp8.
QUANTS = MappingProxyType({torch.int8: "int8_t", torch.float8_e4m3fn: "kiln::e4m3"})
QUANT_DTYPES = MappingProxyType({name: dtype for dtype, name in QUANTS.items()})
LARGEST = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.int8: 127.0})
_SMALLEST_SCALE = 2.0**-126  # the smallest normal float: its reciprocal is finite


def scales_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return max(largest / the largest code, 2^-126), in float32.

    The divisor is a tensor: on CUDA, torch multiplies by the reciprocal of a Python number.
    """
    scale = largest.float() / torch.full_like(largest, LARGEST[dtype], dtype=torch.float32)
    return scale.masked_fill(scale < _SMALLEST_SCALE, _SMALLEST_SCALE)


def encode(y: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return y * (1 / scale) as codes, rounded to nearest even, saturated. float32 throughout."""
    scaled = y.float() * (torch.ones_like(scale) / scale)
    if dtype == torch.int8:
        return scaled.round().clamp(-128, 127).nan_to_num(0.0).to(dtype)
    return scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def quantised(
    y: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of y [rows, d] and their scales, bit for bit as the kernels.

    The scales: ``scale`` [1] if given, or per group [rows, d / 128], or per row [rows, 1]. They are
    float32 for any dtype of y, because a kernel's input is float32 or smaller.
    """
    if scale is not None:
        scale = scale.float().reshape(1)
        return encode(y, scale, dtype), scale
    rows, d = y.shape
    parts = y.reshape(rows, d // group_size, group_size) if group_size else y.unsqueeze(1)
    largest = parts.abs().amax(-1) if rows and d else y.new_empty(parts.shape[:2])
    scales = scales_of(largest, dtype)
    return encode(parts, scales.unsqueeze(-1), dtype).reshape(rows, d), scales


def empty_codes(
    shape: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    group_size: int,
    one_scale: bool,
    column_major: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised codes [rows, d] and their scales, which may be column-major.

    Raises TypeError for a dtype other than float8_e4m3fn and int8, ValueError on a wrong group.
    """
    rows, d = shape
    if dtype not in QUANTS:
        raise TypeError(f"dtype is {dtype}; use one of {', '.join(map(str, QUANTS))}")
    if group_size not in (0, GROUP) or (group_size and d % group_size):
        raise ValueError(
            f"group_size is {group_size} for rows of {d}: want {GROUP}, a divisor, or 0"
        )
    if not d:
        raise ValueError("rows of no elements have no scale")
    codes = torch.empty(rows, d, dtype=dtype, device=device)
    if one_scale:
        return codes, torch.empty(1, device=device)
    across = d // group_size if group_size else 1
    if column_major:
        return codes, torch.empty(across, rows, device=device).T
    return codes, torch.empty(rows, across, device=device)
