"""Products of more rows with weights of 4 and 8 bits by Kiln's kernel, where torch has none.

Torch's way is to turn the weights to floats first, which reads and writes nine times the bytes of
4-bit ones. From about 200 rows on that is faster all the same, because its products of floats are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.implementations import may_run_kernel, run_if_chosen
from kiln.jit_kernels.ops.quantized_linear.checks import ALIGNED, variant_of, why_not
from kiln.jit_kernels.ops.quantized_linear.spec import QUANTIZED_GEMM, tile_rows_for

# Of experts these hold on average.
MOST_ROWS = 192  # with 4-bit weights, on an H100
MOST_ROWS_OF_BYTES = 64  # with 8-bit ones: 1.3 to 2.7 times as fast there as torch's way
_FORMATS = frozenset(("U4", "E2M1", "E4M3", "I8"))
_DTYPES = (torch.bfloat16, torch.float16)
Fields = Sequence[torch.Tensor | None]  # codes, scales and maybe zero points


def many_row_kernels(device: torch.device, needs: Needs) -> list[KernelSpec]:
    """Return the kernel if a model's weights may run it on a device.

    Weights of 8 bits for which ``scaled_products`` has a product do not: the caller knows whether
    a model has others.
    """
    if not _FORMATS & {*needs["weight"]}:
        return []
    return [QUANTIZED_GEMM] if may_run_kernel(QUANTIZED_GEMM, device, needs) else []


def multiplies_many(codes: torch.Tensor, dtype: torch.dtype, rows: int) -> bool:
    """Whether the functions below take so many rows of a dtype, of all experts together.

    They refuse them all the same if the kernel cannot be loaded, or cannot read such codes.
    """
    experts = len(codes) if codes.dim() == 3 else 1
    if dtype not in _DTYPES or not 0 < rows <= _most_rows(codes) * experts:
        return False
    return may_run_kernel(QUANTIZED_GEMM, codes.device, {"scalar_t": SCALARS[dtype]})


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
    if codes.dtype != torch.uint8 and codes.shape[-1] % ALIGNED:
        return others
    return f"up to {_most_rows(codes)} rows by quantized_gemm, more: {others}"


def _most_rows(codes: torch.Tensor) -> int:
    return MOST_ROWS if codes.dtype == torch.uint8 else MOST_ROWS_OF_BYTES


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
    if not multiplies_many(a.codes, a.x.dtype, len(a.x)) or why_not(a):
        return False
    return run_if_chosen(QUANTIZED_GEMM, variant_of(a), a.x.device, a)
