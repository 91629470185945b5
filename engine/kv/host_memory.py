"""Host memory for blocks of the KV pool, and the copies between the two, in a thread."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from kiln.engine.errors import ConfigError
from kiln.engine.kv.device_copies import DeviceCopies, page_lock, unlock
from kiln.engine.kv.pool import KVPool
from kiln.engine.kv.zeros import zeros

_PIECE_BYTES = 2**30  # the memory is allocated, and page-locked for a GPU, in pieces

Wait = Callable[[], object]


class _Copies(Protocol):
    def __call__(self, blocks: list[int], slots: list[int], *, to_host: bool) -> None: ...


class HostMemory:
    """``num_slots`` slots with the contents of a block each: its planes, and then its token ids.

    ``launched`` returns a function that waits until the steps that were launched so far have ended.
    ``report`` hears how many pieces of the memory are ready, of how many. Raises ConfigError if
    memory runs out. See HostBlocks for the methods.
    """

    def __init__(
        self,
        pool: KVPool,
        num_slots: int,
        *,
        launched: Callable[[], Wait],
        report: Callable[[int, int], None],
    ) -> None:
        self.num_slots = num_slots
        self._launched = launched
        locked: list[int] = []
        # Without it, the addresses of this memory could not be page-locked again.
        self._unlock = weakref.finalize(self, unlock, locked)
        self._unlock.atexit = False
        slots = _allocate(pool, num_slots, locked, report)
        copies = DeviceCopies if pool.planes.is_cuda else MemoryCopies
        self._copy: _Copies = copies(pool, slots)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-kv-offload")
        self._thread.submit(int).result()  # starts it: a later copy needs no new thread
        self._copies: deque[Future[None]] = deque()

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy blocks to slots."""
        self._begin(blocks, slots, to_host=True)

    def load(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy slots to blocks."""
        self._begin(blocks, slots, to_host=False)

    def ended(self, *, wait: bool = False) -> list[Exception | None]:
        """Return what each copy raised that has ended, in order."""
        ended: list[Exception | None] = []
        while self._copies and (self._copies[0].done() or (wait and not ended)):
            error = self._copies[0].exception()
            assert error is None or isinstance(error, Exception), error
            self._copies.popleft()
            ended.append(error)
        return ended

    def drain(self) -> None:
        """Wait for all copies and forget them."""
        self._thread.submit(int).result()  # behind them all
        self._copies.clear()

    def close(self, *, wait: bool) -> None:
        """End the thread behind the copies that have begun; no other may follow. May be repeated.

        Without ``wait`` the memory stays page-locked until this object is freed.
        """
        self._thread.shutdown(wait=wait)
        if wait:
            self._unlock()

    def _begin(self, blocks: list[int], slots: list[int], *, to_host: bool) -> None:
        launched = self._launched()
        self._copies.append(self._thread.submit(self._run, launched, blocks, slots, to_host))

    def _run(self, launched: Wait, blocks: list[int], slots: list[int], to_host: bool) -> None:
        launched()
        self._copy(blocks, slots, to_host=to_host)


def slot_bytes(pool: KVPool) -> int:
    """Return the bytes of a slot."""
    planes, _, run = pool.planes.shape
    return planes * run + pool.block_size * pool.token_ids.itemsize


def _allocate(
    pool: KVPool, num_slots: int, locked: list[int], report: Callable[[int, int], None]
) -> list[torch.Tensor]:
    """Return the slots; ``locked`` gets the addresses of the pieces that were page-locked."""
    size, slots = slot_bytes(pool), list[torch.Tensor]()
    in_piece = max(1, _PIECE_BYTES // size)
    num_pieces = -(-num_slots // in_piece)
    report(0, num_pieces)
    for done in range(num_pieces):
        count = min(in_piece, num_slots - len(slots))
        try:
            piece = zeros((count, size), torch.uint8, torch.device("cpu"))
        except RuntimeError as error:
            raise ConfigError(
                f"kv_offload_gib: {num_slots * size / 2**30:.3g} GiB do not fit in host memory: "
                f"lower it ({error})"
            ) from error
        if pool.planes.is_cuda:
            page_lock(piece, pool.planes.device)
            locked.append(piece.data_ptr())
        slots += piece
        report(done + 1, num_pieces)
    return slots


class MemoryCopies:
    """Copies between a pool in host memory and slots, uint8 each."""

    def __init__(self, pool: KVPool, slots: list[torch.Tensor]) -> None:
        self._planes, self._tokens = pool.planes, pool.token_bytes
        self._slots = slots

    @torch.inference_mode()
    def __call__(self, blocks: list[int], slots: list[int], *, to_host: bool) -> None:
        """Copy."""
        planes, _, run = self._planes.shape
        for block, slot in zip(blocks, slots, strict=True):
            held = self._slots[slot]
            keys, tokens = held[: planes * run].view(planes, run), held[planes * run :]
            for own, other in ((self._planes[:, block], keys), (self._tokens[block], tokens)):
                if to_host:
                    other.copy_(own)
                else:
                    own.copy_(other)
