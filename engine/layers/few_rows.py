"""Products of a few rows by Kiln's kernel, where it is as fast as torch's.

With KILN_LINEAR=auto ``row_limits`` says where that is. With KILN_LINEAR=jit the kernel runs on any
GPU, for all rows and weights that it can multiply; with KILN_LINEAR=triton its Triton form does.
The kernel also computes the gated activation behind gate_up, unless KILN_ACTIVATION asks for
another implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kiln.engine.layers.row_limits import MOST_GATED_BYTES, Product, limits_on, product_of
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.implementations import may_fuse, may_run_kernel, run_if_chosen
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS, tiles_for, variant_of, why_not
from kiln.jit_kernels.ops.linear.spec import GATED, SKINNY_GEMM

_DTYPES = (torch.bfloat16, torch.float16)


class Epilogue(NamedTuple):
    """What to do with a product: add ``bias`` [outputs], and write the result to ``out``.

    If ``gate`` is "", out is [num_rows, outputs]. If it names an activation, out is [num_rows,
    outputs / 2], and gets act(first half of the outputs) * second half.
    """

    out: torch.Tensor
    bias: torch.Tensor | None
    gate: str = ""


@dataclass(slots=True)
class Trial:
    """A limit that holds for all products meanwhile, and those that the kernel has multiplied."""

    most_rows: int
    products: set[Product] = field(default_factory=set)


_trials: list[Trial] = []  # the last one holds


@contextmanager
def trial(most_rows: int) -> Iterator[Trial]:
    """Let the kernel multiply up to so many rows of any product, whatever tables and toggles say.

    For measurements, in a process where nothing else multiplies.
    """
    _trials.append(Trial(most_rows))
    try:
        yield _trials[-1]
    finally:
        _trials.pop()


def few_row_kernels(device: torch.device, needs: Needs) -> list[KernelSpec]:
    """Return the kernel if products of a model may run it on a device."""
    if not may_run_kernel(SKINNY_GEMM, device, needs):
        return []
    return [SKINNY_GEMM] if _is_unlimited(device) or limits_on(device).may_multiply else []


def gates_few(activation: str) -> bool:
    """Whether the toggles let the kernel compute a gated activation behind some products."""
    families = (SKINNY_GEMM.family, BY_ACTIVATION["silu"].family)
    return activation in GATED and may_fuse(*families)


def limits_source(device: torch.device) -> str:
    """Say what decides up to how many rows the kernel multiplies on a device."""
    env = settings()
    if env.kernel_choice(SKINNY_GEMM.family) != "auto":
        return env.asked(SKINNY_GEMM.family)
    if device.type != "cuda":
        return f"KILN_CPU_KERNELS={env.cpu_kernels}"
    return limits_on(_with_index(device)).source


def with_limits_source(reason: str, device: torch.device) -> str:
    """Return why the kernel was chosen, and what decides up to how many rows it multiplies."""
    source = limits_source(device)
    return reason if source in reason else f"{reason}; limits of rows: {source}"


def multiplies_few(form: str, weight: torch.Tensor, dtype: torch.dtype, rows: int = 1) -> bool:
    """Whether ``multiply_few`` takes so many rows of a dtype for weights [out, in] of a form.

    It refuses them all the same if the kernel cannot be loaded, or cannot read such rows of codes.
    """
    return 0 < rows <= MOST_ROWS and rows <= _most_rows(form, weight, dtype)


def multiply_few(
    form: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    to: Epilogue,
    scales: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> bool:
    """Multiply x by weight.T, and do what ``to`` says with the product; or return False.

    ``form``: that of the Weight. The other arguments are those of ``skinny_gemm``.
    """
    if not multiplies_few(form, weight, to.out.dtype, len(x)):
        return False
    if to.gate and not (gates_few(to.gate) and _gates(weight)):
        return False
    a = SKINNY_GEMM.parameters.Arguments(
        out=to.out,
        x=x,
        weight=weight,
        x_scales=x_scales,
        scales=scales,
        zeros=zeros,
        bias=to.bias,
        expert_of=None,
        ends=None,
        tiles=tiles_for(len(x), 0),
    )
    if not _runs(a, to.gate):
        return False
    if _trials:
        _trials[-1].products.add(product_of(form, weight, to.out.dtype))
    return True


def multiply_experts(
    form: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    of_experts: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    scales: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return each row of x times the weights of its expert, [num_rows, out] of a dtype, or None.

    ``form``: that of the Weight. weight: [experts, out, in] or codes; ``of_experts``: (experts
    [num_rows], ends [num_experts]). The other arguments are those of ``skinny_gemm``.
    """
    if not multiplies_experts(form, weight, dtype, len(x)):
        return None
    expert_of, ends = of_experts
    a = SKINNY_GEMM.parameters.Arguments(
        out=x.new_empty(len(x), weight.shape[1], dtype=dtype),
        x=x,
        weight=weight,
        x_scales=x_scales,
        scales=scales,
        zeros=zeros,
        bias=None,
        expert_of=expert_of,
        ends=ends,
        tiles=tiles_for(len(x), len(ends)),
    )
    return a.out if _runs(a) else None


def multiplies_experts(form: str, weight: torch.Tensor, dtype: torch.dtype, rows: int) -> bool:
    """Whether ``multiply_experts`` takes so many rows, of all experts together."""
    device = weight.device
    if dtype not in _DTYPES or weight.dim() != 3 or not rows:
        return False
    if not may_run_kernel(SKINNY_GEMM, device, {"scalar_t": SCALARS[dtype]}):
        return False
    return _is_unlimited(device) or rows <= limits_on(device).rows_of_experts(form, len(weight))


def describe_product(form: str, weight: torch.Tensor, others: str) -> str:
    """Return how codes are multiplied; ``others``: how that is done for more rows."""
    if multiplies_experts(form, weight, torch.bfloat16, 1):
        return f"few rows of an expert by skinny_gemm, more: {others}"
    most = _most_rows(form, weight, torch.bfloat16)
    return f"up to {most} rows by skinny_gemm, more: {others}" if most else others


def _runs(a: Arguments, gate: str = "") -> bool:
    """Run the kernel, if it can multiply these arguments and was chosen."""
    device, spec = a.x.device, GATED[gate] if gate else SKINNY_GEMM
    if not may_run_kernel(spec, device, {"scalar_t": SCALARS[a.out.dtype]}):
        return False
    if why_not(a, is_gated=bool(gate)) or not spec.has_variant(variant := variant_of(a, gate)):
        return False
    return run_if_chosen(spec, variant, device, a)


def _most_rows(form: str, weight: torch.Tensor, dtype: torch.dtype) -> int:
    """Return up to how many rows the kernel multiplies; 0: none."""
    if weight.dim() != 2 or dtype not in _DTYPES:
        return 0
    device = weight.device
    if not may_run_kernel(SKINNY_GEMM, device, {"scalar_t": SCALARS[dtype]}):
        return 0
    if _trials:
        return _trials[-1].most_rows
    if _is_unlimited(device):
        return MOST_ROWS
    return limits_on(device).most_rows(product_of(form, weight, dtype), weight.nbytes)


def _gates(weight: torch.Tensor) -> bool:
    """Whether the kernel should compute the activation behind the product with these weights."""
    return _is_unlimited(weight.device) or weight.nbytes <= MOST_GATED_BYTES


def _is_unlimited(device: torch.device) -> bool:
    """Whether the kernel multiplies all that it can: on a CPU, or because the toggle says so."""
    return device.type != "cuda" or settings().kernel_choice(SKINNY_GEMM.family) != "auto"


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
