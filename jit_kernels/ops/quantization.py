"""Quantisation to fp8 (e4m3) and int8: alone, and fused with what makes the rows."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.activation.functions import silu_and_mul
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm, rms_norm
from kiln.jit_kernels.quantization_specs import (
    FUSED_ADD_RMS_NORM_QUANT,
    QUANTIZE,
    RMS_NORM_QUANT,
    SILU_AND_MUL_QUANT,
    SPECS,
    TENSOR_AMAX,
    is_fused,
)
from kiln.jit_kernels.references.quantized import GROUP, empty_codes
from kiln.jit_kernels.shapes import as_rows, check_dtype, check_shape, dense_rows, takes_arrays
from kiln.jit_kernels.torch_ops import call, define

_NUM_MAXIMA = 256  # parts of a tensor whose largest magnitudes are found at once

Quantised = tuple[torch.Tensor, torch.Tensor]


@takes_arrays
def quantize_per_token(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Quantised:
    """Return x [..., d] as codes [..., d] and a scale for each row, float32 [..., 1].

    scale = max |row| / 448, or / 127 for int8, but at least 2^-126; code = x * (1 / scale), rounded
    to nearest even and saturating; x is about code * scale. Each operation is rounded once in
    float32: the bits are the same on every device. A row of zeros gives codes of 0. A NaN or an
    infinity makes its row's scale NaN or infinite. Raises TypeError on a dtype other than bf16,
    fp16, fp32 for x, or float8_e4m3fn and int8 for ``dtype``; ValueError on rows of no elements.
    """
    return _quantize("quantize_per_token", x, dtype)


@takes_arrays
def quantize_per_group(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, column_major_scales: bool = False
) -> Quantised:
    """Return x [..., d] as codes [..., d] and a scale for each 128 elements, [..., d / 128].

    As quantize_per_token. With ``column_major_scales``, the scales [rows, d / 128] of x [rows, d]
    have strides (1, rows), as block-scaled matrix products want the first operand's. Raises
    ValueError where 128 does not divide d.
    """
    return _quantize("quantize_per_group", x, dtype, GROUP, column_major=column_major_scales)


@takes_arrays
def quantize_per_tensor(
    x: torch.Tensor, scale: torch.Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantised:
    """Return x [..., d] as codes [..., d] and the one scale, float32 [1].

    ``scale``: float32 of one element; what is beyond it saturates. Without one it is that of the
    largest magnitude, which takes a second launch. Else as quantize_per_token.
    """
    return _quantize("quantize_per_tensor", x, dtype, scale=scale, dynamic=scale is None)


@takes_arrays
def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int = 0,
    scale: torch.Tensor | None = None,
    column_major_scales: bool = False,
) -> Quantised:
    """Return rms_norm(x, weight, eps) quantised, bit for bit what those two functions give.

    x: [..., d], weight: [d]. The scales are those of rows [..., 1]; with ``group_size`` 128 those
    of groups [..., d / 128]; with ``scale``, float32 of one element, that one for all, [1]. One
    launch in bf16, else two. Raises as rms_norm and quantize_per_group do.
    """
    check_dtype("rms_norm_quant", x=x, weight=weight)
    check_shape("rms_norm_quant", "weight", weight, x.shape[-1:])
    rows = dense_rows(x)
    given = _given("rms_norm_quant", scale)
    codes = empty_codes(rows.shape, x.device, dtype, group_size, scale is not None,
                        column_major_scales)  # fmt: skip
    if is_fused(x.dtype):
        numbers = (group_size, eps, weight_offset)
        call(RMS_NORM_QUANT, *codes, rows, weight.contiguous(), given, *numbers)
    else:
        y = rms_norm(rows, weight, eps, weight_offset=weight_offset)
        call(QUANTIZE, *codes, y, given, None, group_size)
    return _shaped(x, *codes)


@takes_arrays
def fused_add_rms_norm_quant(  # noqa: PLR0913 (the norm and the quantisation)
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int = 0,
    scale: torch.Tensor | None = None,
    column_major_scales: bool = False,
) -> Quantised:
    """Add x to residual in place and return the norm of the sum, quantised as rms_norm_quant does.

    x, residual: [..., d] of one shape; weight: [d]. x is left as it is. Bit for bit what the
    addition, rms_norm and quantisation give. Raises as fused_add_rms_norm and rms_norm_quant do.
    """
    name = "fused_add_rms_norm_quant"
    check_dtype(name, x=x, residual=residual, weight=weight)
    check_shape(name, "weight", weight, x.shape[-1:])
    check_shape(name, "residual", residual, x.shape)
    rows, sums = dense_rows(x), as_rows(residual)
    if sums is None:
        raise ValueError(
            f"{name} adds in place and needs dense rows at one distance; residual has strides "
            f"{residual.stride()}: pass a contiguous tensor"
        )
    given = _given(name, scale)
    codes = empty_codes(rows.shape, x.device, dtype, group_size, scale is not None,
                        column_major_scales)  # fmt: skip
    if is_fused(x.dtype):
        numbers = (group_size, eps, weight_offset)
        call(FUSED_ADD_RMS_NORM_QUANT, *codes, sums, rows, weight.contiguous(), given, *numbers)
    else:
        y = rows.clone()
        fused_add_rms_norm(y, sums, weight, eps, weight_offset)
        call(QUANTIZE, *codes, y, given, None, group_size)
    return _shaped(x, *codes)


@takes_arrays
def silu_and_mul_quant(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int = 0,
    scale: torch.Tensor | None = None,
    column_major_scales: bool = False,
) -> Quantised:
    """Return silu_and_mul(x) quantised, bit for bit what those two functions give.

    x: [..., 2d]; the codes are [..., d]. The scales and what is raised are those of rms_norm_quant,
    and ValueError on an odd last dimension.
    """
    check_dtype("silu_and_mul_quant", x=x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul_quant: x is {list(x.shape)}, want an even last dimension")
    rows, given = dense_rows(x), _given("silu_and_mul_quant", scale)
    shape = (rows.shape[0], rows.shape[1] // 2)
    codes = empty_codes(shape, x.device, dtype, group_size, scale is not None, column_major_scales)
    if is_fused(x.dtype):
        call(SILU_AND_MUL_QUANT, *codes, rows, given, group_size)
    else:
        call(QUANTIZE, *codes, silu_and_mul(rows), given, None, group_size)
    return _shaped(x, *codes)


def _quantize(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    group: int = 0,
    scale: torch.Tensor | None = None,
    dynamic: bool = False,
    column_major: bool = False,
) -> Quantised:
    check_dtype(name, x=x)
    rows, given, maxima = dense_rows(x), _given(name, scale), None
    whole = dynamic or scale is not None
    codes = empty_codes(rows.shape, x.device, dtype, group, whole, column_major)
    if dynamic:
        maxima = torch.empty(_NUM_MAXIMA, device=x.device)
        call(TENSOR_AMAX, maxima, rows)
    call(QUANTIZE, *codes, rows, given, maxima, group)
    return _shaped(x, *codes)


def _given(name: str, scale: torch.Tensor | None) -> torch.Tensor | None:
    if scale is None:
        return None
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"{name}: scale is {scale.dtype} {list(scale.shape)}, want one float32")
    return scale.reshape(1)


def _shaped(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> Quantised:
    """Give codes and scales the leading dimensions of x, where that takes no copy."""
    if x.dim() == 2:
        return codes, scales
    leading = x.shape[:-1]
    if scales.dim() == 2 and scales.is_contiguous():
        scales = scales.view(*leading, scales.shape[1])
    return codes.view(*leading, codes.shape[1]), scales


define(SPECS)
