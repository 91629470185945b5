"""The public functions of the all-reduces: one call of a group, of all its ranks or of one."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, VECTOR, Algorithm, vectors
from kiln.jit_kernels.ops.all_reduce.members import Members
from kiln.jit_kernels.ops.all_reduce.record import FUSED
from kiln.jit_kernels.ops.all_reduce.spec import BY_ALGORITHM, FUSED_ALL_REDUCE_ADD_RMS_NORM
from kiln.jit_kernels.ops.shared.shapes import check_dtype, check_shape
from kiln.jit_kernels.torch_ops import call


def all_reduce(
    x: torch.Tensor, members: Members, algorithm: Algorithm, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of x over the group's ranks: in float32, in their order, rounded once.

    x [ranks, ...]: the messages of the ranks that ``members`` runs, any alignment; not written.
    ``out``: where the sums are written, the shape of x; it may be x. The bits are the same for
    every algorithm, rank and size. All ranks of a group must make the same calls in the same order,
    each in one stream. If a rank comes too late, the result is undefined and the members' record
    tells who was late.

    Raises ValueError on a wrong shape or a message larger than the layout's, TypeError on a dtype
    other than bf16, fp16, fp32, KeyError on an unknown algorithm.
    """
    if algorithm not in BY_ALGORITHM:
        raise KeyError(f"no all-reduce is named {algorithm!r}: use {', '.join(ALGORITHMS)}")
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_dtype(algorithm, x=x, out=out)
    check_shape(algorithm, "out", out, x.shape)
    _check_ranks(algorithm, x, members)
    rows, sums = _messages(x), _messages(out)
    if sums is None:
        raise ValueError(
            f"{algorithm}: out has strides {out.stride()}; each rank's part must be contiguous"
        )
    if rows is None:
        rows = x.contiguous().flatten(1)
    _check_bytes(algorithm, rows.shape[1] * x.element_size(), members)
    call(BY_ALGORITHM[algorithm], out=sums, x=rows, **members.arguments())
    return out


def fused_all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    members: Members,
    *,
    weight_offset: float = 0.0,
    round_once: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the sum of x over the ranks to residual in place; return the norm of the new residual.

    x, residual [ranks, rows, d], contiguous for each rank; weight [d]. The same bits as
    ``all_reduce`` and then ``fused_add_rms_norm``. ``out`` may be x. Else like ``all_reduce``,
    whose one-shot push it contains; a row takes whole vectors of 16 bytes of a slot.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_dtype(FUSED, x=x, residual=residual, weight=weight, out=out)
    if x.dim() != 3:
        raise ValueError(f"{FUSED}: x is {list(x.shape)}, want [ranks, rows, d]")
    check_shape(FUSED, "weight", weight, x.shape[-1:])
    check_shape(FUSED, "residual", residual, x.shape)
    check_shape(FUSED, "out", out, x.shape)
    _check_ranks(FUSED, x, members)
    for name, tensor in {"x": x, "residual": residual, "out": out}.items():
        if _messages(tensor) is None:
            raise ValueError(f"{FUSED}: {name} has strides {tensor.stride()}; want contiguous rows")
    _, rows, d = x.shape
    _check_bytes(FUSED, rows * vectors(d * x.element_size()) * VECTOR, members)
    call(
        FUSED_ALL_REDUCE_ADD_RMS_NORM,
        out=out,
        residual=residual,
        x=x,
        weight=weight.contiguous(),
        **members.arguments(),
        eps=eps,
        weight_offset=weight_offset,
        round_once=round_once,
    )
    return out


def _messages(x: torch.Tensor) -> torch.Tensor | None:
    """Return x [ranks, ...] as a view [ranks, n] with dense rows, or None if there is none."""
    if x.is_contiguous() or x[0].is_contiguous():
        return x.view(x.shape[0], -1) if x.numel() else x.new_empty(x.shape[0], 0)
    return None


def _check_ranks(function: str, x: torch.Tensor, members: Members) -> None:
    if x.dim() < 2 or x.shape[0] != members.num_ranks:
        raise ValueError(
            f"{function}: x is {list(x.shape)}, want [{members.num_ranks}, ...]: a message for "
            "each rank of the launch"
        )


def _check_bytes(function: str, num_bytes: int, members: Members) -> None:
    limit = members.layout.limit(function)
    if num_bytes > limit:
        raise ValueError(
            f"{function}: a message of {num_bytes} bytes; the group's buffers hold {limit}"
        )
