"""What captures and replays a graph on a device: the interface, and CUDA's form of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, Protocol

import torch

from kiln.jit_kernels.launch import at_graph_edge

_TIMED_REPLAYS = 8

Call = Callable[[], None]
Between = Callable[[Call], None]
"""Ends a piece of a graph. The call runs at each replay, between this piece and the next."""


class Graph(Protocol):
    """A captured sequence of operations on fixed addresses, in one piece or several."""

    def replay(self) -> None:
        """Queue the operations on the current stream."""


class GraphDevice(Protocol):
    """Captures graphs that share one memory pool; they never run at the same time."""

    def capture(self, function: Callable[[Between], None]) -> Graph:
        """Record what ``function`` queues, without running it. Raises what it raises.

        The calls that it gives to its argument are neither run nor recorded now.
        """

    def renew_pool(self) -> None:
        """Give graphs that are captured from now on a new memory pool."""

    def milliseconds(self, graph: Graph) -> float:
        """Return the time of a replay; 0 if it cannot be measured."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a captured tensor in a form that may be kept after the capture.

        It is valid from a replay of its graph to the next replay of any graph.
        """


class _PiecewiseGraph:
    """CUDA graphs with calls between them. Most have one piece and no call."""

    def __init__(self, pool: Any, device: torch.device) -> None:
        self._pool = pool
        self._edge = partial(at_graph_edge, device)  # for early launches on both sides of it
        self._piece = torch.cuda.CUDAGraph()
        self._calls: list[Call] = []

    def begin(self) -> None:
        """Start to capture a piece."""
        # Not torch.cuda.graph: it empties the allocator's cache for every graph.
        self._piece = torch.cuda.CUDAGraph()
        self._edge()
        self._piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the piece that is captured."""
        self._piece.capture_end()
        self._edge()
        self._calls += [self._piece.replay, self._edge]

    def between(self, call: Call) -> None:
        """End a piece, and start the next one behind the call."""
        self.end()
        self._calls.append(call)
        self.begin()

    def replay(self) -> None:
        """Queue every piece, with the calls between them."""
        for call in self._calls:
            call()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that captures, one for all engines of the process.

    cuBLAS keeps a workspace of 32 MiB for each stream that it was called on, also after the engine
    is closed. A branch that runs beside a layer has another stream of lower priority, so that it
    gets what the layer leaves it.
    """
    return torch.cuda.Stream(device, priority=-1)


class CudaGraphs:
    """CUDA graphs: one capture stream and one memory pool for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[Between], None]) -> Graph:
        """Run ``function`` once on the capture stream, then record it.

        The first run initialises libraries and loads their kernels, which a capture forbids.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = _PiecewiseGraph(self._pool, self._device)
        with torch.cuda.stream(self._stream):
            function(lambda call: None)
            self._stream.synchronize()
            graph.begin()
            try:
                function(graph.between)
            except BaseException:
                with suppress(RuntimeError):  # CUDA refuses to end a capture that is invalid
                    graph.end()
                raise
            graph.end()
        current.wait_stream(self._stream)
        return graph

    def renew_pool(self) -> None:
        """Give graphs that are captured from now on a new memory pool.

        torch does not accept the handle of a pool again after all its graphs are gone.
        """
        self._pool = torch.cuda.graph_pool_handle()

    def milliseconds(self, graph: Graph) -> float:
        """Return the mean time of some replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(_TIMED_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / _TIMED_REPLAYS

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same memory that does not own it.

        The pool can give the memory to the next graph, which never runs at the same time.
        """
        storage = tensor.untyped_storage()
        bare = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), tensor.device, storage.nbytes()
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def frozen_garbage(enabled: bool) -> Iterator[None]:
    """Collect garbage once, and not inside the block: each collection would take a tenth second."""
    if not enabled:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
