"""Copy adapters into the pool while steps run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kiln.engine.lora.packing import PackedAdapter
from kiln.engine.lora.pool import AdapterPool

STAGING_BYTES = 8 * 2**20  # of each of two buffers

Write = Callable[[torch.Tensor, torch.Tensor], None]  # from, to


class Copier:
    """Copies in a thread; no step may read the elements until a copy has ended."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool
        self._write: Write = StagedWrite(pool) if pool.values.is_cuda else copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-lora-copy")
        self._thread.submit(int).result()  # starts it: a later copy needs no new thread
        self._copies: deque[tuple[Future[None], tuple[PackedAdapter, int, int]]] = deque()

    def begin(self, adapter: PackedAdapter, slot: int, start: int) -> None:
        """Begin to copy an adapter to the elements from ``start`` on.

        All steps that could read these elements have been collected.
        """
        place = self._pool.values[start : start + adapter.values.numel()]
        future = self._thread.submit(self._write, adapter.values, place)
        self._copies.append((future, (adapter, slot, start)))

    def ended(self, *, wait: bool) -> Iterator[tuple[str, BaseException | None]]:
        """Publish each adapter whose copy has ended, in the order of their beginning.

        Yields its name and what the copy raised; its elements then hold anything. A step that is
        launched from now on sees the adapter. With ``wait``, first wait for the oldest copy.
        """
        while self._copies and (wait or self._copies[0][0].done()):
            future, (adapter, slot, start) = self._copies.popleft()
            error = future.exception()
            if error is None:
                self._pool.place(adapter, slot, start)
            yield adapter.name, error
            wait = False

    def forget(self, slot: int) -> None:
        """Drop the copies to a slot that ``ended`` has not returned; first wait for them."""
        of_slot = [each for each in self._copies if each[1][1] == slot]
        for each in of_slot:
            each[0].exception()
            self._copies.remove(each)


@torch.inference_mode()
def copy(source: torch.Tensor, place: torch.Tensor) -> None:
    """Copy on a CPU."""
    place.copy_(source)


class StagedWrite:
    """Copies to a GPU on a stream of its own, through two small page-locked buffers in turn.

    Adapters are in ordinary memory. When they were read into page-locked memory of their own, a
    decode step on an H200 took 73 ms while one was loaded.
    """

    def __init__(self, pool: AdapterPool) -> None:
        values = pool.values
        self._stream = torch.cuda.Stream(values.device)
        # The pool's zeros are written on the current stream: a copy must not come before them.
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        size = STAGING_BYTES // values.dtype.itemsize
        self._buffers = [torch.empty(size, dtype=values.dtype, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event(blocking=True) for _ in self._buffers]

    @torch.inference_mode()
    def __call__(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy, and wait until the copy has ended."""
        size = len(self._buffers[0])
        for index, (part, to) in enumerate(zip(source.split(size), place.split(size), strict=True)):
            buffer, sent = self._buffers[index % 2][: len(part)], self._sent[index % 2]
            sent.synchronize()  # what the buffer held before has been sent
            buffer.copy_(part)
            with torch.cuda.stream(self._stream):
                to.copy_(buffer, non_blocking=True)
                sent.record(self._stream)
        for sent in self._sent:
            sent.synchronize()
