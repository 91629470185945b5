"""References of the quantisation kernels, in torch, and their error measures."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import largest_error
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.norm.reference import normalise
from kiln.jit_kernels.ops.quantization.codes import LARGEST, quantised, scales_of

_SCALE_ERROR = 2.0**-6
_SUM_ERROR = 1.01  # tolerance of a sum, in units of its dtype's epsilon


def quantize_reference(a: Arguments) -> Results:
    """[rows, d] -> codes [rows, d], and scales [rows, 1], [rows, d / 128] or [1]."""
    if a.maxima is not None:
        a = a._replace(scale=scales_of(a.maxima.amax().reshape(1), _code_dtype(a)))
    return _codes_of(a.x, a)


def tensor_amax_reference(a: Arguments) -> Results:
    """[rows, d] -> [num_parts]: the largest magnitude of rows b, b + num_parts, ..."""
    (rows, d), parts = a.x.shape, a.out.numel()
    largest = a.x.abs().float().amax(-1) if d else a.x.new_zeros(rows).float()
    if not rows:
        return {"out": largest.new_zeros(parts)}
    return {"out": F.pad(largest, (0, -rows % parts)).reshape(-1, parts).amax(0)}


def rms_norm_quant_reference(a: Arguments) -> Results:
    """[rows, d], [d] -> codes and scales of the norm."""
    return _codes_of(_normalised(a), a)


def fused_add_rms_norm_quant_reference(a: Arguments) -> Results:
    """[rows, d] twice, [d] -> codes and scales of the norm of the sum, and the sum."""
    total = a.x + a.residual
    return {**rms_norm_quant_reference(a._replace(x=total)), "residual": total}


def silu_and_mul_quant_reference(a: Arguments) -> Results:
    """[rows, 2d] -> codes and scales of silu(x[:, :d]) * x[:, d:]."""
    return _codes_of(_gated(a), a)


def rms_norm_quant_error(a: Arguments, wanted: Results) -> float:
    """Return the largest error of the codes, relative to what rounding may leave."""
    return _code_error(a, wanted, _normalised(_wide(a)))


def fused_add_rms_norm_quant_error(a: Arguments, wanted: Results) -> float:
    """Return the largest error of the sum's codes, or of the sum if the sum is wrong."""
    total = wanted["residual"]
    error = largest_error(a.residual, total) / torch.finfo(a.residual.dtype).eps
    if not error <= _SUM_ERROR:
        return error
    return _code_error(a, wanted, _normalised(_wide(a._replace(x=a.residual))))


def silu_and_mul_quant_error(a: Arguments, wanted: Results) -> float:
    """Return the largest error of the codes, relative to what rounding may leave."""
    return _code_error(a, wanted, _gated(a._replace(x=a.x.double())))


def _normalised(a: Arguments) -> torch.Tensor:
    return normalise(a.x, a.weight, a)


def _wide(a: Arguments) -> Arguments:
    return a._replace(x=a.x.double(), weight=a.weight.double())


def _gated(a: Arguments) -> torch.Tensor:
    gate, up = (a.x if a.x.dtype == torch.float64 else a.x.float()).chunk(2, dim=-1)
    y: torch.Tensor = F.silu(gate) * up
    return y.to(a.x.dtype)


def _codes_of(y: torch.Tensor, a: Arguments) -> Results:
    codes, scales = quantised(y, _code_dtype(a), a.scale, a.group_size)
    return {"out": codes, "scales": scales}


def _code_dtype(a: Arguments) -> torch.dtype:
    """Return the dtype of the codes; tests pass e4m3 codes converted to float64."""
    return torch.int8 if a.out.dtype == torch.int8 else torch.float8_e4m3fn


def _code_error(a: Arguments, wanted: Results, y: torch.Tensor) -> float:
    """Return the largest error of out * scales against y, relative to the rounding error.

    The rounding error is half a step between codes, plus twice the rounding of y to the dtype of
    x, because Triton's interpreter rounds bf16 down. Infinite if a scale is NaN or wrong. y:
    [rows, d] float64.
    """
    if a.out.numel() == 0:
        return 0.0
    want_scales, scales = wanted["scales"].double(), a.scales.double()
    if not bool(((scales - want_scales).abs() <= _SCALE_ERROR * want_scales).all()):
        return float("inf")
    if scales.dim() == 2:
        scales = scales.repeat_interleave(y.shape[1] // scales.shape[1], dim=1)
    largest, is_int8 = LARGEST[a.out.dtype], a.out.dtype == torch.int8
    exact = (y / scales).clamp(-128.0 if is_int8 else -largest, largest)
    if is_int8:
        half = torch.full_like(exact, 0.5)
    else:
        half = torch.exp2(exact.abs().clamp(min=2.0**-6).log2().floor() - 4)
    allowed = half + 2 * torch.finfo(a.x.dtype).eps * exact.abs()
    return float(((a.out.double() - exact).abs() / allowed).max())
