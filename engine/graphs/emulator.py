"""Graphs on a CPU: operations are recorded, and replayed on the same memory.

What a CUDA graph does silently wrong is an error here, or shows as a wrong result: a value read on
the host, a tensor made from host data, a number that was fixed at the capture, an input whose
memory was replaced, memory that nothing wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kiln.engine.errors import KilnError
from kiln.engine.graphs.device import Between, Call, Graph

# torch's own marks of operations whose result, or its size, is known only after a read.
_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_"}
_FROM_HOST = {"aten::lift_fresh", "aten::lift_fresh_copy"}


class CaptureError(KilnError):
    """An operation that no graph can contain."""


class EmulatedGraph:
    """Recorded operations, each with its arguments and its results."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def between(self, call: Call) -> None:
        """Record a call that is not part of the graph and may do anything."""
        self.calls.append((call, (), {}, []))

    def replay(self) -> None:
        """Run the operations again; their results go to the memory of the recorded ones."""
        for function, args, kwargs, results in self.calls:
            if _leaves_memory_unwritten(function):
                _poison(results)
                continue
            for old, new in zip(results, _tensors(function(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class EmulatedGraphs:
    """Records on a CPU. Unlike on a GPU, the operations also run while they are recorded.

    ``opened`` maps operators to the functions that they stand for: what these run is recorded.
    """

    def __init__(self, opened: Mapping[Any, Callable[..., Any]]) -> None:
        self._opened = opened

    def capture(self, function: Callable[[Between], None]) -> EmulatedGraph:
        """Run ``function`` and record it. Raises CaptureError, naming the operation."""
        recorder = _Recorder(self._opened)
        with _no_reads(recorder), recorder:
            function(recorder.graph.between)
        # The recorder may outlive this call, as a part of what torch keeps of replaced methods.
        graph, recorder.graph = recorder.graph, EmulatedGraph()
        return graph

    def renew_pool(self) -> None:
        """Do nothing: each recording owns its memory."""

    def milliseconds(self, graph: Graph) -> float:
        """Return 0: the time of an emulation says nothing about a GPU."""
        return 0.0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: the recording owns the memory."""
        return tensor


class _Recorder(TorchDispatchMode):
    def __init__(self, opened: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = EmulatedGraph()
        self._opened = opened
        self.is_inside = False  # of an operation, which may do anything

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if _reads_on_host(func, args, kwargs or {}):
            raise CaptureError(f"a graph is captured: {name} reads a value on the host")
        if name in _FROM_HOST:
            raise CaptureError(f"a graph is captured: {name} makes a tensor from host data")
        if func in self._opened:
            with self:
                return self._opened[func](*args, **(kwargs or {}))
        self.is_inside = True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.is_inside = False
        if _leaves_memory_unwritten(func):
            _poison(_tensors(result))
        if not (func.is_view and _shares_memory(result, args)):
            self.graph.calls.append((func, args, kwargs or {}, _tensors(result)))
        return result


def _reads_on_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation on a GPU waits for a value, or for the number of results."""
    name = func._schema.name
    if name in _INDEXED:  # the trues of a mask are counted, except to fill them with one number
        masks = [one for one in args[1] if one is not None and not one.dtype.is_signed]
        return bool(masks) and not (name != "aten::index" and args[2].numel() == 1)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return bool(_HOST_READS.intersection(func.tags))


def _leaves_memory_unwritten(function: Any) -> bool:
    name = function._schema.name if isinstance(function, torch._ops.OpOverload) else ""
    return name.startswith(("aten::empty", "aten::new_empty"))


def _poison(results: list[torch.Tensor]) -> None:
    """On a GPU the memory holds what other operations left there: NaN shows if it is read."""
    for result in results:
        if result.is_floating_point():
            result.fill_(float("nan"))


def _shares_memory(result: Any, args: Any) -> bool:
    """Whether a result is a view. Some operations, such as ``to``, copy only where they must."""
    given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
    return all(tensor.untyped_storage().data_ptr() in given for tensor in _tensors(result))


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _no_reads(recorder: _Recorder) -> Iterator[None]:
    """Refuse the reads that torch does not dispatch as operations."""

    def refuse(name: str, method: Any) -> Any:
        def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_inside:
                raise CaptureError(f"a graph is captured: Tensor.{name} reads values on the host")
            return method(tensor, *args, **kwargs)

        return checked

    names = ("tolist", "numpy", "__array__", "cpu")
    methods = {name: refuse(name, getattr(torch.Tensor, name)) for name in names}
    with mock.patch.multiple(torch.Tensor, **methods):
        yield
