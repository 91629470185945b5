"""Codes and scales: what every kernel that quantises shares, and its reference arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from kiln.jit_kernels.spec import Sizes, Variant

GROUP = 128  # elements that share a scale, where it is not a row or all
# int8 first: tests of the first variant alone use torch.library.opcheck, which knows no fp8.
QUANTS = MappingProxyType({torch.int8: "int8_t", torch.float8_e4m3fn: "kiln::e4m3"})
QUANT_DTYPES = MappingProxyType({name: dtype for dtype, name in QUANTS.items()})
LARGEST = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.int8: 127.0})
_SMALLEST_SCALE = 2.0**-126  # the smallest normal float: its reciprocal is finite
_SCALE_ERROR = 2.0**-6


def scales_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return max(largest / the largest code, 2^-126), in float32.

    On the device divided by a tensor: torch multiplies by the reciprocal of a number on CUDA.
    """
    scale = largest.float() / torch.full_like(largest, LARGEST[dtype], dtype=torch.float32)
    return scale.masked_fill(scale < _SMALLEST_SCALE, _SMALLEST_SCALE)


def encode(y: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return y * (1 / scale) as codes, rounded to nearest even, saturating. float32 throughout."""
    scaled = y.float() * (torch.ones_like(scale) / scale)
    if dtype == torch.int8:
        return scaled.round().clamp(-128, 127).nan_to_num(0.0).to(dtype)
    return scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def quantised(
    y: torch.Tensor, dtype: torch.dtype, given: torch.Tensor | None, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of y [rows, d] and their scales, bit for bit what kernels give for y.

    The scales: ``given`` [1], or of each group [rows, d / 128], or of each row [rows, 1]. float32
    whatever y is, for a kernel's input fits in one.
    """
    if given is not None:
        given = given.float().reshape(1)
        return encode(y, given, dtype), given
    rows, d = y.shape
    parts = y.reshape(rows, d // group, group) if group else y.unsqueeze(1)
    largest = parts.abs().amax(-1) if rows and d else y.new_empty(parts.shape[:2])
    scale = scales_of(largest, dtype)
    return encode(parts, scale.unsqueeze(-1), dtype).reshape(rows, d), scale


def empty_codes(
    shape: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype,
    group: int,
    given: bool,
    column_major: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for codes [rows, d] and their scales, which may be column-major.

    Raises TypeError for a dtype other than float8_e4m3fn and int8, ValueError on a wrong group.
    """
    rows, d = shape
    if dtype not in QUANTS:
        raise TypeError(f"dtype is {dtype}; use one of {', '.join(map(str, QUANTS))}")
    if group not in (0, GROUP) or (group and d % group):
        raise ValueError(f"group_size is {group} for rows of {d}: want {GROUP}, a divisor, or 0")
    if not d:
        raise ValueError("rows of no elements have no scale")
    codes = torch.empty(rows, d, dtype=dtype, device=device)
    if given:
        return codes, torch.empty(1, device=device)
    across = d // group if group else 1
    if column_major:
        return codes, torch.empty(across, rows, device=device).T
    return codes, torch.empty(rows, across, device=device)


def scale_strides(scales: torch.Tensor) -> tuple[int, int]:
    """Return how far apart the scales of two rows and of two groups are, in elements."""
    return (scales.stride(0), scales.stride(1)) if scales.dim() == 2 else (0, 0)


def code_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    """Return outputs, a given scale or None, and the group size, for a case of a spec.

    ``sizes`` may say "gap" (between rows), "code_gap", "group", "given" and "column_major".
    """
    rows, d, group = sizes["rows"], sizes["d"], sizes.get("group", 0)
    given = torch.tensor([0.02], device=device) if sizes.get("given") else None
    dtype = QUANT_DTYPES[variant["quant_t"]]
    wide_d = d + sizes.get("code_gap", sizes.get("gap", 0))
    wide = torch.empty(rows, wide_d, dtype=dtype, device=device)
    column_major = bool(sizes.get("column_major"))
    scales = empty_codes((rows, d), device, dtype, group, given is not None, column_major)[1]
    return wide[:, :d], scales, given, group


def code_bytes(sizes: Sizes) -> int:
    """Return the bytes of the codes and scales of a case."""
    rows, d, group = sizes["rows"], sizes["d"], sizes.get("group", 0)
    count = 1 if sizes.get("given") else rows * (d // group if group else 1)
    return rows * d + 4 * count


def code_error(
    codes: torch.Tensor,
    scales: torch.Tensor,
    want_scales: torch.Tensor,
    y: torch.Tensor,
    dtype: torch.dtype,
) -> float:
    """Return the largest error of codes * scales against y, relative to what rounding may leave.

    That is half a step between codes, and what y's own rounding to ``dtype`` adds: twice, and as
    Triton's interpreter rounds bf16, down. Infinite where a scale is far from what is wanted; a NaN
    gives that too. y: [rows, d] float64.
    """
    if codes.numel() == 0:
        return 0.0
    wanted = want_scales.double()
    if not bool(((scales.double() - wanted).abs() <= _SCALE_ERROR * wanted).all()):
        return float("inf")
    groups = scales.double()
    if groups.dim() == 2:
        groups = groups.repeat_interleave(y.shape[1] // groups.shape[1], dim=1)
    largest = LARGEST[codes.dtype]
    lowest = -128.0 if codes.dtype == torch.int8 else -largest
    exact = (y / groups).clamp(lowest, largest)
    if codes.dtype == torch.int8:
        half = torch.full_like(exact, 0.5)
    else:
        half = torch.exp2(exact.abs().clamp(min=2.0**-6).log2().floor() - 4)
    allowed = half + 2 * torch.finfo(dtype).eps * exact.abs()
    return float(((codes.double() - exact).abs() / allowed).max())
