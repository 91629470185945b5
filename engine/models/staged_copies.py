"""Copy stored tensors to a device: threads read them into pinned buffers, a stream copies these.

A tensor is read in pieces, by several threads at once, because one thread copies less from the page
cache than a device takes. Each piece is copied on the current stream as soon as it is read. So what
the caller does next on that stream comes after the copies, and sees the whole tensor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from kiln.engine.models.file_extents import Extent, read_extent

_BUFFER = 4 << 20  # bytes
_LEAST = 256 << 10  # bytes: a thread that reads less saves nothing
_THREADS = 8
_READ_AHEAD = 256 << 20  # bytes

Wait = Callable[[], None]


class Copier(Protocol):
    """How host memory is copied to a device."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return host memory to copy from, [num_bytes] uint8."""

    def copy(self, out: torch.Tensor, stored: torch.Tensor) -> Wait:
        """Begin to copy ``stored`` to ``out``, which may have another dtype, behind other copies.

        Returns a function that waits until ``stored`` has been read. Any thread may call it.
        """


class CudaCopier:
    """Copies pinned memory to a GPU on its current stream; the GPU converts dtypes."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, out: torch.Tensor, stored: torch.Tensor) -> Wait:
        """Begin to copy ``stored`` to ``out``."""
        if out.dtype == stored.dtype:
            out.copy_(stored, non_blocking=True)
        else:
            out.copy_(stored.to(out.device, non_blocking=True))
        event = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to others
        event.record(torch.cuda.current_stream(out.device))
        return event.synchronize


class _Buffer(NamedTuple):
    stored: torch.Tensor
    view: memoryview
    wait: Wait  # until it may be written


class _Piece(NamedTuple):
    place: slice  # of elements
    buffer: _Buffer
    task: Future[None] | None  # None: it was read already


class StagedCopies:
    """Copies tensors of one dtype after another through at most ``num_buffers`` buffers.

    One thread may use it.
    """

    def __init__(
        self,
        copier: Copier,
        num_threads: int | None = None,
        buffer_bytes: int = _BUFFER,
        num_buffers: int | None = None,
    ) -> None:
        self._copier = copier
        self._num_threads = num_threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self._num_threads, "weights")
        self._buffer_bytes = buffer_bytes
        self._unmade = num_buffers or 2 * self._num_threads
        self._free: deque[_Buffer] = deque()
        self._ahead: dict[int, int] = {}  # file -> end of what was announced

    def copy(self, out: torch.Tensor, dtype: torch.dtype, file: int, places: list[Extent]) -> None:
        """Write the elements of ``dtype`` at ``places`` of an open file into ``out``.

        When it returns, all was read, and the current stream will copy it. Raises OSError.
        """
        if not out.numel():
            return
        whole = out if out.is_contiguous() else out.new_empty(out.shape)
        flat, first = whole.view(-1), 0
        pieces: deque[_Piece] = deque()
        try:
            for extent, alone in self._pieces(places):
                if not self._free and not self._unmade:
                    self._finish(flat, dtype, pieces)
                last = first + extent.num_bytes // dtype.itemsize
                pieces.append(self._begin(slice(first, last), file, extent, alone=alone))
                first = last
            while pieces:
                self._finish(flat, dtype, pieces)
        finally:  # after an error, threads still write to the other buffers
            self._give_up(pieces)
        if whole is not out:
            self._copier.copy(out, whole)

    def read_ahead(self, file: int, end: int) -> None:
        """Let the system read what is behind ``end`` of a file, while other work is done.

        A file system that takes no advice loses nothing: errors are no one's concern.
        """
        told = self._ahead.get(file, 0)
        if end + _READ_AHEAD // 2 <= told <= end + _READ_AHEAD:
            return
        begin = told if end <= told <= end + _READ_AHEAD else end
        self._ahead[file] = end + _READ_AHEAD
        size = end + _READ_AHEAD - begin
        self._threads.submit(os.posix_fadvise, file, begin, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Wait until everything was copied, and end the threads."""
        self._threads.shutdown()
        for buffer in self._free:
            buffer.wait()
        self._free.clear()

    def _pieces(self, places: Sequence[Extent]) -> Iterator[tuple[Extent, bool]]:
        """Yield the pieces, and whether a piece is alone and so small that no thread is needed."""
        total = sum(place.num_bytes for place in places)
        share = -(-total // self._num_threads)
        most = min(self._buffer_bytes, max(_LEAST, -(-share // 4096) * 4096))
        for place in places:
            for piece in place.pieces(most):
                yield piece, total <= _LEAST

    def _begin(self, place: slice, file: int, extent: Extent, *, alone: bool) -> _Piece:
        """Read a piece into a free buffer, in a thread unless it is ``alone``."""
        if not self._free:
            stored = self._copier.buffer(self._buffer_bytes)
            self._free.append(_Buffer(stored, stored.numpy().data, lambda: None))
            self._unmade -= 1
        buffer, task = self._free[0], None
        if alone:
            _read(buffer, file, extent)
        else:
            task = self._threads.submit(_read, buffer, file, extent)
        self._free.popleft()
        return _Piece(place, buffer, task)

    def _finish(self, out: torch.Tensor, dtype: torch.dtype, pieces: deque[_Piece]) -> None:
        """Copy the first of the pieces when it was read."""
        piece = pieces[0]
        if piece.task is not None:
            piece.task.result()
        own = out[piece.place]
        stored = piece.buffer.stored[: own.numel() * dtype.itemsize].view(dtype)
        wait = self._copier.copy(own, stored)
        self._free.append(piece.buffer._replace(wait=wait))
        pieces.popleft()

    def _give_up(self, pieces: deque[_Piece]) -> None:
        for piece in pieces:
            if piece.task is not None:
                piece.task.exception()  # waits
            self._free.append(piece.buffer)
        pieces.clear()


def _read(buffer: _Buffer, file: int, extent: Extent) -> None:
    buffer.wait()
    read_extent(file, extent, buffer.view)
