"""Views and checks that the public kernel functions share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.jit_kernels.spec import SCALARS


def check_dtype(function: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that are not of one supported dtype and on one device.

    Raises TypeError for the dtype, ValueError for the device.
    """
    first_name, first = next(iter(tensors.items()))
    if first.dtype not in SCALARS:
        wanted = ", ".join(str(dtype) for dtype in SCALARS)
        raise TypeError(f"{function}: {first_name} is {first.dtype}; use one of {wanted}")
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{function}: {name} is {tensor.dtype} but {first_name} is {first.dtype}"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{function}: {name} is on {tensor.device} but {first_name} on {first.device}"
            )


def check_shape(function: str, name: str, tensor: torch.Tensor, wanted: Sequence[int]) -> None:
    """Raise ValueError unless the tensor has the wanted shape."""
    if tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f"{function}: {name} is {list(tensor.shape)}, want {list(wanted)}")


def as_rows(x: torch.Tensor) -> torch.Tensor | None:
    """Return x [..., d] as a view [rows, d] with dense rows, or None where no such view exists.

    Rows may be any distance apart. Returns a view, never a copy.
    """
    if x.dim() == 0:
        return None
    d = x.shape[-1]
    if x.numel() == 0:
        return x.new_empty(x.numel() // d if d else 0, d)
    if x.stride(-1) != 1 and d != 1:
        return None
    if x.dim() == 2:
        return x
    if x.dim() == 1:
        return x.unsqueeze(0)
    try:
        return x.view(-1, d)
    except RuntimeError:  # the leading dimensions do not lie at one distance
        return None


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., d] as [rows, d] with dense rows: a view where possible, else a copy."""
    rows = as_rows(x)
    if rows is None:
        rows = as_rows(x.contiguous())
    if rows is None:
        raise ValueError("want a tensor of at least one dimension, got a scalar")
    return rows


def row_stride(x: torch.Tensor) -> int:
    """Return the distance between rows of [rows, d], in elements."""
    return x.stride(0)
