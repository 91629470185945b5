"""Views and checks that the public kernel functions share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kiln.jit_kernels.spec import SCALARS


def check_dtype(function: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that are not of one supported dtype and on one device.

    Raises TypeError for the dtype, ValueError for the device.
    """
    first_name, first = next(iter(tensors.items()))
    dtype, device = first.dtype, first.device
    if dtype in SCALARS and all(t.dtype is dtype and t.device == device for t in tensors.values()):
        return
    if dtype not in SCALARS:
        wanted = ", ".join(str(dtype) for dtype in SCALARS)
        raise TypeError(f"{function}: {first_name} is {dtype}; use one of {wanted}")
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{function}: {name} is {tensor.dtype} but {first_name} is {dtype}")
        if tensor.device != device:
            raise ValueError(
                f"{function}: {name} is on {tensor.device} but {first_name} on {device}"
            )


def check_shape(function: str, name: str, tensor: torch.Tensor, wanted: Sequence[int]) -> None:
    """Raise ValueError unless the tensor has the wanted shape."""
    if tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f"{function}: {name} is {list(tensor.shape)}, want {list(wanted)}")


def as_rows(x: torch.Tensor) -> torch.Tensor | None:
    """Return x [..., d] as a view [rows, d] with dense rows, or None where no such view exists.

    Rows may be any distance apart. Returns a view, never a copy.
    """
    if x.dim() == 2 and x.stride(1) == 1 and x.numel():  # what models pass
        return x
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
    # A view exists when the leading dimensions lie at one distance; asking first is cheaper than
    # a refusal from view().
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    steps = [(n, stride) for n, stride in zip(sizes, strides, strict=True) if n > 1]
    for (_, outer), (inner_size, inner) in pairwise(steps):
        if outer != inner_size * inner:
            return None
    return x.view(-1, d)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., d] as [rows, d] with dense rows: a view where possible, else a copy."""
    rows = as_rows(x)
    if rows is None:
        rows = as_rows(x.contiguous())
    if rows is None:
        raise ValueError("want a tensor of at least one dimension, got a scalar")
    return rows
