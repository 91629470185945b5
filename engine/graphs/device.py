"""What captures and replays a graph on a device: the interface, and CUDA's form of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Graph(Protocol):
    """A captured sequence of operations on fixed addresses."""

    def replay(self) -> None:
        """Queue the operations on the current stream."""


class GraphDevice(Protocol):
    """Captures graphs that share one memory pool; they never run at the same time."""

    def capture(self, function: Callable[[], None]) -> Graph:
        """Record what ``function`` queues, without running it. Raises what it raises."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a captured tensor in a form that may be kept after the capture.

        It is valid from a replay of its graph to the next replay of any graph.
        """


class CudaGraphs:
    """CUDA graphs: one capture stream and one memory pool for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Graph:
        """Run ``function`` once on the capture stream, then record it.

        The first run initialises libraries and loads their kernels, which a capture forbids.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            function()
            self._stream.synchronize()
            # Not torch.cuda.graph: it empties the allocator's cache for every graph.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph

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
