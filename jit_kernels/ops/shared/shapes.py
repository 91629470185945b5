"""Shared by the public kernel functions: arrays of other libraries, views, checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch

from kiln.jit_kernels.declare.spec import SCALARS

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_OURS = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, tuple, type(None)})


def takes_arrays(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Let a kernel function take arrays of CuPy, NumPy or other libraries instead of tensors.

    Arrays are converted through DLPack without a copy, so the function writes into the array. An
    ``out`` that is an array is returned itself; other results are tensors. On a GPU the kernel is
    queued on torch's current stream, after the work that the array's library has queued. Raises
    TypeError on an array that cannot be shared.
    """

    @functools.wraps(function)
    def with_arrays(*args: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
        for value in args:
            if type(value) not in _OURS:  # isinstance would take four times as long
                break
        else:
            if not named or all(type(value) in _OURS for value in named.values()):
                return function(*args, **named)
        result: _Result = _call_with_tensors(function, args, named)
        return result

    return with_arrays


def _call_with_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    tensors = [_as_tensor(function.__name__, value) for value in args]
    more = {key: _as_tensor(function.__name__, value) for key, value in named.items()}
    result = function(*tensors, **more)
    for own, given in zip((*tensors, *more.values()), (*args, *named.values()), strict=True):
        if result is own:
            return given  # the caller's own object: ``out``
    return result


def _as_tensor(function: str, value: Any) -> Any:
    """Return a tensor that shares an array's memory; return anything else unchanged."""
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dlpack__"):
        return value
    # NumPy 2.1 and later export read-only arrays too, and a kernel could then write to them.
    if not getattr(getattr(value, "flags", None), "writeable", True):
        raise TypeError(f"{function}: an array is read-only: pass a copy")
    try:
        return torch.utils.dlpack.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{function}: an array of {type(value).__module__} cannot be shared: {error}"
        ) from None


def check_dtype(function: str, **tensors: torch.Tensor) -> None:
    """Check that tensors have one supported dtype and are on one device.

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
    """Return x [..., d] as a view [rows, d] with dense rows, or None if no such view exists.

    Any row stride is supported. This function never copies.
    """
    if x.dim() == 2 and x.stride(1) == 1 and x.numel():  # the common case: what models pass
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
    # A view exists if the leading dimensions share one stride. This check is cheaper than an
    # exception from view().
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
