"""Decode steps as captured graphs: one for each batch size, replayed instead of launched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import torch

from kiln.engine.graphs.buckets import bucket_for
from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.graphs.device import Graph, GraphDevice, frozen_garbage
from kiln.engine.requests.batch import Batch

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # stage, done, total
CaptureHook = Callable[[int], AbstractContextManager[object]]
"""Is entered before the first capture, with the most rows of a graph, and left after the last."""


class GraphKey(NamedTuple):
    """What a graph was captured for. ``variant`` tells graphs of one size apart."""

    rows: int
    variant: str = ""


class Captured(NamedTuple):
    """A graph and the logits [rows, vocab_size] that it computes, valid until the next replay."""

    graph: Graph
    logits: torch.Tensor


class CudaGraphRunner:
    """Whole decode steps, from the inputs to the sampled tokens, captured by batch size.

    ``step(rows)`` runs such a step for a fixed number of rows, padding included, on tensors whose
    addresses never change, and returns the logits. ``addresses()`` returns them: a graph is not
    replayed if they are not those of its capture. With ``strict`` a graph that cannot be captured
    is an error; else its size runs without a graph.
    """

    def __init__(
        self,
        step: Callable[[int], torch.Tensor],
        buckets: Sequence[int],
        device: GraphDevice,
        addresses: Callable[[], tuple[int, ...]],
        *,
        hooks: Sequence[CaptureHook] = (),
        garbage_collection: bool = False,
        strict: bool = False,
    ) -> None:
        self.buckets = tuple(sorted(set(buckets)))
        self.counts = GraphCounts()
        self.step = step
        self._device = device
        self._addresses = addresses
        self._hooks = hooks
        self._garbage_collection = garbage_collection
        self._strict = strict
        self._captured: dict[GraphKey, Captured] = {}
        self._captured_addresses: tuple[int, ...] = ()

    def capture(self, progress: Progress) -> None:
        """Capture a graph for every bucket, the largest first: its memory serves the smaller ones.

        Everything that a step runs must have been compiled and loaded before.
        """
        with ExitStack() as around:
            for hook in self._hooks:
                around.enter_context(hook(self.buckets[-1]))
            around.enter_context(frozen_garbage(not self._garbage_collection))
            for done, rows in enumerate(reversed(self.buckets)):
                progress("CUDA graphs", done, len(self.buckets))
                self._capture(rows)
        progress("CUDA graphs", len(self.buckets), len(self.buckets))
        self.buckets = tuple(sorted(key.rows for key in self._captured))
        self._captured_addresses = self._addresses()

    def measure(self, free_bytes: Callable[[], int]) -> int:
        """Return about how many bytes of device memory all graphs take; capture again afterwards.

        Measured are the largest and the one after it. The smaller ones reuse the memory of the
        largest, so each takes about as much as the second: what the driver keeps of a graph.
        """
        free = [free_bytes()]
        for rows in self.buckets[:-3:-1]:
            self._capture(rows)
            free.append(free_bytes())
        self._captured.clear()
        first, second = free[0] - free[1], max(free[1] - free[-1], 0)
        return first + second * (len(self.buckets) - 1)

    def drop(self, rows: int, reason: str) -> None:
        """Run batches of a size without a graph, or in a larger one, from now on."""
        logger.warning("CUDA graph of %d rows is not used: %s", rows, reason)
        self._captured.pop(GraphKey(rows), None)
        self.buckets = tuple(size for size in self.buckets if size != rows)
        self.counts.fallbacks[f"{rows} rows: {reason}"] += 1

    def can_run(self, batch: Batch) -> str:
        """Return why a batch cannot run in a graph; "" if it can."""
        if not batch.is_decode:
            return "prefill"
        if bucket_for(self.buckets, len(batch.requests)) is None:
            return "too many rows"
        return ""

    def replay_prepare(self, batch: Batch) -> int:
        """Return the size of the graph that a batch runs in. Raises RuntimeError if memory moved.

        The caller sends the batch's message; the graph itself lays out inputs and padding.
        """
        if self._addresses() != self._captured_addresses:
            raise RuntimeError("the inputs of a CUDA graph have moved since it was captured")
        rows = bucket_for(self.buckets, len(batch.requests))
        assert rows is not None, "can_run was asked first"
        return rows

    def replay(self, rows: int) -> torch.Tensor:
        """Run the graph of a size and return its logits [rows, vocab_size]."""
        captured = self._captured[GraphKey(rows)]
        captured.graph.replay()
        self.counts.replays[str(rows)] += 1
        return captured.logits

    def _capture(self, rows: int) -> None:
        logits: list[torch.Tensor] = []

        def step() -> None:
            logits[:] = [self._device.keep(self.step(rows))]

        try:
            graph = self._device.capture(step)
        except Exception as error:
            if self._strict:
                raise
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            self.drop(rows, "out of memory" if out_of_memory else f"{error}".partition("\n")[0])
        else:
            self._captured[GraphKey(rows)] = Captured(graph, logits[0])
