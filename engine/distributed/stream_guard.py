"""Keeps the sums of a group in one order: two at the same time would mix up their data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.cuda.Stream:
        """Return the current stream; equal streams compare equal."""
        return torch.cuda.current_stream(self._device)

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured."""
        return torch.cuda.is_current_stream_capturing()

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream wait; in a capture this becomes an edge of the graph."""
        self.current().wait_stream(stream)


class StreamGuard:
    """Orders calls that come from several streams.

    Calls that run, and calls that a capture records, are two orders: what is recorded runs at a
    replay, which is a call of its own. ``waits`` counts the waits that were inserted.
    """

    def __init__(self, streams: CudaStreams | None) -> None:
        """``streams`` None: a device without streams, where nothing is to be done."""
        self.waits = 0
        self._streams = streams
        self._ran: Any = None  # stream of the latest call that ran
        self._recorded: Any = None  # of the latest call in this capture

    def enter(self) -> None:
        """Order a call, or the replay of a graph with calls, behind the one before."""
        if self._streams is None:
            return
        stream = self._streams.current()
        if self._streams.is_capturing():
            before, self._recorded = self._recorded, stream
        else:
            before, self._ran = self._ran, stream
        if before is not None and before != stream:
            self._streams.wait_for(before)
            self.waits += 1

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Begin an order of its own for the calls that a capture inside the block records."""
        outer, self._recorded = self._recorded, None
        try:
            yield
        finally:
            self._recorded = outer
