"""Products of more rows with 4-bit weights by Kiln's kernel, where it is as fast as torch's.

Torch's way is to turn the weights to floats first, which reads and writes nine times their bytes.
From about 200 rows on that is faster all the same, because its products of floats are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.implementations import may_run_kernel, run_if_chosen
from kiln.jit_kernels.ops.quantized_linear.spec import (
    QUANTIZED_GEMM,
    tile_rows_for,
    variant_of,
    why_not,
)

MOST_ROWS = 192  # on an H100; of experts: on average
_DTYPES = (torch.bfloat16, torch.float16)
Fields = Sequence[torch.Tensor | None]  # codes, scales and maybe zero points


def many_row_kernels(device: torch.device, needs: Needs) -> list[KernelSpec]:
    """Return the kernel if a model's weights may run it on a device."""
    if not {"U4", "E2M1"} & {*needs["weight"]}:
        return []
    return [QUANTIZED_GEMM] if may_run_kernel(QUANTIZED_GEMM, device, needs) else []


def multiply_many(
    x: torch.Tensor, fields: Fields, out: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Write x @ weight.T + bias to out [num_rows, out], or return False."""
    return _runs(_arguments(x, fields, out, bias, None))


def multiply_many_experts(
    x: torch.Tensor, fields: Fields, ends: torch.Tensor
) -> torch.Tensor | None:
    """Return each row of x times the weights of its expert, [num_rows, out], or None.

    ``fields`` have the experts in front; ends [num_experts]: where the rows of each end.
    """
    codes = fields[0]
    assert codes is not None
    out = x.new_empty(len(x), codes.shape[1])
    return out if _runs(_arguments(x, fields, out, None, ends)) else None


def many_row_product(codes: torch.Tensor, others: str) -> str:
    """Return how codes are multiplied; ``others``: how that is done for more rows."""
    if not may_run_kernel(QUANTIZED_GEMM, codes.device, {"scalar_t": SCALARS[torch.bfloat16]}):
        return others
    return f"up to {MOST_ROWS} rows by quantized_gemm, more: {others}"


def _arguments(
    x: torch.Tensor,
    fields: Fields,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None,
) -> Arguments:
    codes, scales, zeros = (*fields, None)[:3]
    experts = 0 if ends is None else len(ends)
    return QUANTIZED_GEMM.parameters.Arguments(
        out=out,
        x=x,
        codes=codes,
        scales=scales,
        zeros=zeros,
        bias=bias,
        ends=ends,
        tile_rows=tile_rows_for(len(x), experts),
    )


def _runs(a: Arguments) -> bool:
    """Run the kernel, if it can multiply these arguments, was chosen and is as fast as torch."""
    device, most = a.x.device, MOST_ROWS * (1 if a.ends is None else len(a.ends))
    if a.x.dtype not in _DTYPES or not 0 < len(a.x) <= most:
        return False
    if not may_run_kernel(QUANTIZED_GEMM, device, {"scalar_t": SCALARS[a.out.dtype]}) or why_not(a):
        return False
    return run_if_chosen(QUANTIZED_GEMM, variant_of(a), device, a)
