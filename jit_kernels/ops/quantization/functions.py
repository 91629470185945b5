"""The public functions that quantise: alone, and fused with a norm or an activation."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.ops.activation.functions import silu_and_mul
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm, rms_norm
from kiln.jit_kernels.ops.quantization.codes import GROUP, empty_codes
from kiln.jit_kernels.ops.quantization.spec import (
    FUSED_ADD_RMS_NORM_QUANT,
    QUANTIZE,
    RMS_NORM_QUANT,
    SILU_AND_MUL_QUANT,
    TENSOR_AMAX,
    is_fused,
)
from kiln.jit_kernels.ops.shared.shapes import (
    as_rows,
    check_dtype,
    check_shape,
    dense_rows,
    takes_arrays,
)
from kiln.jit_kernels.torch_ops import call

_NUM_MAXIMA = 256  # parts of a tensor whose largest magnitudes are computed in parallel

Quantised = tuple[torch.Tensor, torch.Tensor]


@takes_arrays
def quantize_per_token(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Quantised:
    """Return x [..., d] as codes [..., d] and a scale for each row, float32 [..., 1].

    scale = max |row| / 448, or / 127 for int8, but at least 2^-126; code = x * (1 / scale), rounded
    to nearest even and saturated; x is about code * scale. Each operation is rounded once in
    float32: the bits are the same on every device. A row of zeros gives codes of 0. A NaN or an
    infinity makes the scale of its row NaN or infinite. Raises TypeError on a dtype other than
    bf16, fp16, fp32 for x, or float8_e4m3fn and int8 for ``dtype``; ValueError on rows of no
    elements.
    """
    return _quantize("quantize_per_token", x, dtype)


@takes_arrays
def quantize_per_group(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, column_major_scales: bool = False
) -> Quantised:
    """Return x [..., d] as codes [..., d] and a scale for each 128 elements, [..., d / 128].

    As quantize_per_token. With ``column_major_scales``, the scales [rows, d / 128] of x [rows, d]
    have strides (1, rows), the layout of the first operand of a block-scaled matrix product. Raises
    ValueError where 128 does not divide d.
    """
    return _quantize("quantize_per_group", x, dtype, GROUP, column_major=column_major_scales)


@takes_arrays
def quantize_per_tensor(
    x: torch.Tensor, scale: torch.Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantised:
    """Return x [..., d] as codes [..., d] and the one scale, float32 [1].

    ``scale``: float32 of one element; values outside its range saturate. By default it is computed
    from the largest magnitude, in a second launch. Otherwise as quantize_per_token.
    """
    return _quantize("quantize_per_tensor", x, dtype, scale=scale, dynamic=scale is None)


@takes_arrays
def rms_norm_quant(  # noqa: PLR0913 (the norm and the quantisation)
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int = 0,
    scale: torch.Tensor | None = None,
    column_major_scales: bool = False,
    round_once: bool = False,
) -> Quantised:
    """Return rms_norm(x, weight, eps, …) quantised, with the same bits as two calls.

    x: [..., d], weight: [d]. There is a scale per row [..., 1]; with ``group_size`` 128, per group
    [..., d / 128]; with ``scale``, float32 of one element, only that one [1]. One launch in bf16,
    else two. Raises as rms_norm and quantize_per_group do.
    """
    check_dtype("rms_norm_quant", x=x, weight=weight)
    check_shape("rms_norm_quant", "weight", weight, x.shape[-1:])
    rows, norm = dense_rows(x), _norm(weight, eps, weight_offset, round_once)
    codes = _codes("rms_norm_quant", rows, dtype, group_size, scale, column_major_scales)
    if is_fused(x.dtype):
        call(RMS_NORM_QUANT, **codes, x=rows, **norm)
    else:
        call(QUANTIZE, **codes, x=rms_norm(rows, **norm), maxima=None)
    return _shaped(x, codes)


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
    round_once: bool = False,
) -> Quantised:
    """Add x to residual in place and return the norm of the sum, quantised as rms_norm_quant does.

    x, residual: [..., d] of one shape; weight: [d]. x does not change. It gives the same bits as
    addition, rms_norm and quantisation in turn. Raises as fused_add_rms_norm and rms_norm_quant do.
    """
    name = "fused_add_rms_norm_quant"
    check_dtype(name, x=x, residual=residual, weight=weight)
    check_shape(name, "weight", weight, x.shape[-1:])
    check_shape(name, "residual", residual, x.shape)
    rows, sums = dense_rows(x), as_rows(residual)
    if sums is None:
        raise ValueError(
            f"{name} adds in place and needs dense rows with one row stride; residual has strides "
            f"{residual.stride()}: pass a contiguous tensor"
        )
    norm = _norm(weight, eps, weight_offset, round_once)
    codes = _codes(name, rows, dtype, group_size, scale, column_major_scales)
    if is_fused(x.dtype):
        call(FUSED_ADD_RMS_NORM_QUANT, **codes, residual=sums, x=rows, **norm)
    else:
        y = rows.clone()
        fused_add_rms_norm(y, sums, **norm)
        call(QUANTIZE, **codes, x=y, maxima=None)
    return _shaped(x, codes)


@takes_arrays
def silu_and_mul_quant(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int = 0,
    scale: torch.Tensor | None = None,
    column_major_scales: bool = False,
) -> Quantised:
    """Return silu_and_mul(x) quantised, with the same bits as two calls.

    x: [..., 2d]; the codes are [..., d]. Scales and exceptions as in rms_norm_quant, and ValueError
    on an odd last dimension.
    """
    check_dtype("silu_and_mul_quant", x=x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul_quant: x is {list(x.shape)}, want an even last dimension")
    rows = dense_rows(x)
    gate = rows[:, : rows.shape[1] // 2]
    codes = _codes("silu_and_mul_quant", gate, dtype, group_size, scale, column_major_scales)
    if is_fused(x.dtype):
        call(SILU_AND_MUL_QUANT, **codes, x=rows)
    else:
        call(QUANTIZE, **codes, x=silu_and_mul(rows), maxima=None)
    return _shaped(x, codes)


def _quantize(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    group_size: int = 0,
    scale: torch.Tensor | None = None,
    dynamic: bool = False,
    column_major: bool = False,
) -> Quantised:
    check_dtype(name, x=x)
    rows, maxima = dense_rows(x), None
    codes = _codes(name, rows, dtype, group_size, scale, column_major, dynamic)
    if dynamic:
        maxima = torch.empty(_NUM_MAXIMA, device=x.device)
        call(TENSOR_AMAX, out=maxima, x=rows)
    call(QUANTIZE, **codes, x=rows, maxima=maxima)
    return _shaped(x, codes)


def _norm(
    weight: torch.Tensor, eps: float, weight_offset: float, round_once: bool
) -> dict[str, Any]:
    factors = {"eps": eps, "weight_offset": weight_offset, "round_once": round_once}
    return {"weight": weight.contiguous(), **factors}


def _codes(
    name: str,
    y: torch.Tensor,
    dtype: torch.dtype,
    group_size: int,
    scale: torch.Tensor | None,
    column_major: bool,
    dynamic: bool = False,
) -> dict[str, Any]:
    """Return what all these operators take, for y [rows, d]: outputs, scale and group size."""
    if scale is not None:
        if scale.dtype != torch.float32 or scale.numel() != 1:
            found = f"{scale.dtype} {list(scale.shape)}"
            raise ValueError(f"{name}: scale is {found}, want one float32")
        scale = scale.reshape(1)
    one_scale = dynamic or scale is not None
    out, scales = empty_codes(y.shape, y.device, dtype, group_size, one_scale, column_major)
    return {"out": out, "scales": scales, "scale": scale, "group_size": group_size}


def _shaped(x: torch.Tensor, codes: dict[str, Any]) -> Quantised:
    """Return codes and scales with the leading dimensions of x, if that needs no copy."""
    out, scales = codes["out"], codes["scales"]
    if x.dim() == 2:
        return out, scales
    leading = x.shape[:-1]
    if scales.dim() == 2 and scales.is_contiguous():
        scales = scales.view(*leading, scales.shape[1])
    return out.view(*leading, out.shape[1]), scales
