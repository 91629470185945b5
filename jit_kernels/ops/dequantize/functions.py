"""The public function that turns weights of few bits back to floats."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.dequantize.reference import dequantize_reference
from kiln.jit_kernels.ops.dequantize.spec import DEQUANTIZE, ELEMENTS, KERNEL_DTYPES
from kiln.jit_kernels.torch_ops import call


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    outputs: slice,
    dtype: torch.dtype,
    inputs: int,
    zeros: torch.Tensor | int = 0,
    groups: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Return (code - zero) * scale of some outputs of weights, [.., num_outputs, inputs].

    codes [.., out, inputs] are uint8, int8 or float8_e4m3fn; uint8 [.., out, inputs / 2] holds
    those of 4 bits as ``pack_codes`` puts them, with inputs a multiple of 128. scales: float32 [..,
    out, groups], or [.., out / 128, groups], rounded up; or uint8 for codes of the format e2m1:
    exponents of 2, plus 127.
    ``zeros``: zero points, int16 of the shape of the scales, or one for all. ``groups``: how many
    neighbouring inputs share a scale, 0: all; or int32 [.., inputs], the group of each input. The
    leading dimensions are none or that of experts. Everything is contiguous. The difference is
    exact; the product is rounded to float32, then to ``dtype``. Raises ValueError.
    """
    lead, all_rows = codes.shape[:-2], codes.shape[-2]
    start, stop, _ = outputs.indices(all_rows)
    experts = lead[0] if lead else 1
    out = torch.empty(experts, stop - start, inputs, dtype=dtype, device=codes.device)
    given_zeros, zero = (zeros, 0) if isinstance(zeros, torch.Tensor) else (None, zeros)
    group_of, size = (groups, inputs) if isinstance(groups, torch.Tensor) else (None, groups)
    arguments = {
        "out": out,
        "codes": codes.view(experts, *codes.shape[-2:]),
        "scales": scales.view(experts, *scales.shape[-2:]),
        "zeros": None if given_zeros is None else given_zeros.view(experts, *scales.shape[-2:]),
        "group_of": None if group_of is None else group_of.view(experts, -1),
        "first": start,
        "group_size": size or inputs,
        "zero": zero,
    }
    if inputs % ELEMENTS or dtype not in KERNEL_DTYPES:
        named = DEQUANTIZE.arguments(DEQUANTIZE.parameters.positional(arguments))
        out.copy_(dequantize_reference(named)["out"])
    else:
        call(DEQUANTIZE, **arguments)
    return out.view(*lead, stop - start, inputs)
