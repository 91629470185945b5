"""Products of 8-bit codes with scales, by torch's functions where they are exact and fast.

Elsewhere the functions return False, and the caller multiplies what it dequantises. What torch
takes, by its sources and by trial on a CPU and an H100:

    tensor                  conditions
    fp8, a scale per row    compute capability 8.9 or higher; in % 16 = 0, out % 16 = 0
    int8                    CUDA; in % 8 = 0, out % 8 = 0, more than 16 rows
    fp8, blocks of 128      compute capability 9.0 and CUDA 12.9; in % 128 = 0, out % 16 = 0
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

_LEAST_INT8_ROWS = 17
# From so many rows on, fp8 products in bf16 use fast accumulation: tensor cores then never move
# partial sums to float32. vLLM uses it for any number of rows. On an H100 prompts are 7 to 12 %
# faster with it, and products of fewer rows are not. The error of the outputs, relative to the
# length of a row, is 0.0017 without it, which is the rounding to bf16. With it, it is 0.0022 for
# 4,096 inputs and 0.0035 for 14,336. Rounding the inputs to fp8 causes an error of 0.03.
_LEAST_FAST_ROWS = 129
_BLOCK = 128


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has the product of codes of a dtype with a scale per row."""
    return _capability(device) >= ((7, 5) if dtype == torch.int8 else (8, 9))


def multiplies_rows(weight: torch.Tensor) -> bool:
    """Whether ``multiply_rows`` takes codes [out, in] of a projection."""
    multiple = 8 if weight.dtype == torch.int8 else 16
    fits = not any(size % multiple for size in weight.shape)
    return weight.dim() == 2 and fits and has_rows(weight.device, weight.dtype)


def multiply_rows(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
) -> bool:
    """Write (codes * scales) @ (weight * weight_scales).T to out [num_rows, out], or return False.

    codes: [num_rows, in]; scales: [num_rows, 1], of any strides; weight: [out, in], weight_scales:
    [out, 1]. Tensor cores of a GPU add up 8-bit floats with fewer digits than float32 has, so
    ``out`` must be of 16 bits for them.
    """
    if not multiplies_rows(weight) or not out.is_contiguous():
        return False
    if codes.dtype == torch.int8:
        rows = len(codes)
        if rows < _LEAST_INT8_ROWS:
            codes = F.pad(codes, (0, 0, 0, _LEAST_INT8_ROWS - rows))
        sums = torch._int_mm(codes, weight.T)[:rows]
        torch.mul(sums * scales, weight_scales.T, out=out)  # float32, rounded once to out
        return True
    if out.itemsize > 2:
        return False
    torch._scaled_mm(
        codes,
        weight.T,
        scales.contiguous(),
        weight_scales.T,
        out_dtype=out.dtype,
        use_fast_accum=out.dtype == torch.bfloat16 and len(codes) >= _LEAST_FAST_ROWS,
        out=out,
    )
    return True


def multiplies_blocks(weight: torch.Tensor) -> bool:
    """Whether ``multiply_blocks`` takes codes [out, in] of a projection."""
    if weight.dim() != 2 or weight.shape[0] % 16 or weight.shape[1] % _BLOCK:
        return False
    return has_blocks(weight.device)


def multiply_blocks(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
) -> bool:
    """Write (codes * scales) @ (weight * weight_scales).T to out [num_rows, out], or return False.

    All codes are 8-bit floats. codes: [num_rows, in]; scales: [num_rows, in / 128], best column by
    column. weight: [out, in]; weight_scales: [out / 128, in / 128], with both rounded up, the
    second to a multiple of 4. Wrong numbers come back, without an error, if it is not.
    """
    if not multiplies_blocks(weight) or out.itemsize > 2:
        return False
    by_row, by_block = F.ScalingType.BlockWise1x128.value, F.ScalingType.BlockWise128x128.value
    (rows, *size), columns = out.shape, scales.T
    if rows % 4:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, -rows % 4)).view(codes.dtype)
        columns = F.pad(columns, (0, -rows % 4))
    whole = out if len(codes) == rows and out.is_contiguous() else out.new_empty(len(codes), *size)
    # F.scaled_mm calls this function, but has no argument for an existing output tensor. Copying
    # the outputs to it would take 10 % of the time of a prefill.
    torch._scaled_mm_v2(
        codes, weight.T, [columns.contiguous().T], [by_row], [], [weight_scales.T], [by_block], [],
        None, out.dtype, out=whole,
    )  # fmt: skip
    if whole is not out:
        out.copy_(whole[:rows])
    return True


@cache
def has_blocks(device: torch.device) -> bool:
    """Whether a device has the product of 8-bit floats with a scale per block."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return _capability(device) == (9, 0) and version >= (12, 9) and hasattr(torch, "_scaled_mm_v2")
