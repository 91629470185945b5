"""Products of a few rows by Kiln's kernel, where it is as fast as torch's.

benchmarks/gpu_check_few_rows.md has the times on an H100, for 2 to 235 MB of weights. Up to 8 rows
the kernel is faster than cuBLAS and torch's fp8 products; up to 16 rows it is, unless the weights
are large. With KILN_LINEAR=auto it runs in these cases alone, and only on such GPUs. With
KILN_LINEAR=jit it runs on any GPU, for all rows and weights that it can multiply; with
KILN_LINEAR=triton its Triton form does.
"""

from __future__ import annotations

import math

import torch

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.implementations import decision, may_run_kernel
from kiln.jit_kernels.ops.linear.spec import MOST_ROWS, SKINNY_GEMM, why_not

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_ROWS_OF_LARGE = 8
LARGE_FLOATS, LARGE_BLOCKS = 40 * 2**20, 20 * 2**20  # bytes of weights
_MEASURED = (9, 0)  # the compute capability
_ASKS = ("jit", "triton")  # choices of the toggle that ask for a kernel wherever one can multiply


def few_row_kernels(device: torch.device, needs: Needs) -> list[KernelSpec]:
    """Return the kernel if products of a model may run it on a device."""
    may_run = may_run_kernel(SKINNY_GEMM, device, needs)
    return [SKINNY_GEMM] if may_run and _most_rows(device, MOST_ROWS) else []


def multiplies_few(
    weight: torch.Tensor, dtype: torch.dtype, rows: int = 1, large: float = math.inf
) -> bool:
    """Whether ``multiply_few`` takes so many rows of a dtype for weights [out, in].

    It refuses them all the same if the kernel cannot be loaded, or cannot read such rows of codes.
    ``large``: with more bytes of weights, torch is as fast for more than 8 rows.
    """
    most = _MOST_ROWS_OF_LARGE if weight.nbytes > large else MOST_ROWS
    if weight.dim() != 2 or dtype not in _DTYPES:
        return False
    if not 0 < rows <= _most_rows(weight.device, most):
        return False
    return may_run_kernel(SKINNY_GEMM, weight.device, {"scalar_t": SCALARS[dtype]})


def multiply_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    large: float = math.inf,
) -> bool:
    """Write x @ weight.T + bias to out [num_rows, out], or return False.

    ``large`` is that of ``multiplies_few``, the other arguments are those of ``skinny_gemm``.
    """
    if not multiplies_few(weight, out.dtype, len(x), large):
        return False
    a = SKINNY_GEMM.parameters.Arguments(
        out=out, x=x, weight=weight, x_scales=x_scales, scales=scales, bias=bias
    )
    if why_not(a):
        return False
    if decision(SKINNY_GEMM, SKINNY_GEMM.bind(a).variant, x.device).implementation == "torch":
        return False
    SKINNY_GEMM.operator(*a)
    return True


def describe_product(weight: torch.Tensor, others: str) -> str:
    """Return how codes are multiplied; ``others``: how that is done for more rows."""
    if not multiplies_few(weight, torch.bfloat16):
        return others
    return f"up to {MOST_ROWS} rows by skinny_gemm, more: {others}"


def _most_rows(device: torch.device, most: int) -> int:
    """Return how many rows the kernel multiplies on a device; ``most``: where it was measured."""
    if device.type != "cuda" or settings().kernel_choice(SKINNY_GEMM.family) in _ASKS:
        return MOST_ROWS
    # A device without an index stands for GPUs of other machines, for which kernels are compiled.
    is_measured = device.index is None or (torch.cuda.get_device_capability(device) == _MEASURED)
    return most if is_measured else 0
