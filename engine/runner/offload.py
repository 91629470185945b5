"""The host memory for KV blocks: that of one rank, and how rank 0 uses that of all ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kiln.engine.config import KVConfig
from kiln.engine.distributed.followers import Followers
from kiln.engine.distributed.group import Group
from kiln.engine.errors import ConfigError
from kiln.engine.kv.host_blocks import HostBlocks
from kiln.engine.kv.host_memory import HostMemory, slot_bytes
from kiln.engine.kv.pool import KVPool
from kiln.engine.models.loader import Progress
from kiln.engine.runner.executor import Executor
from kiln.engine.runner.threaded_executor import ThreadedExecutor

logger = logging.getLogger(__name__)


def host_memory(
    config: KVConfig,
    pool: KVPool,
    group: Group,
    steps: Executor | ThreadedExecutor,
    progress: Progress,
) -> HostMemory | None:
    """Return the memory of one rank for the blocks of its pool; None without ``kv_offload_gib``.

    All ranks have as many slots. Raises ConfigError if there is none, or if memory runs out.
    """
    if not config.kv_offload_gib:
        return None
    size = slot_bytes(pool)
    num_slots = int(config.kv_offload_gib * 2**30 / group.size) // size
    num_slots = group.minimum([num_slots])[0]
    if not num_slots:
        raise ConfigError(
            f"kv_offload_gib={config.kv_offload_gib}: holds no KV block, which has "
            f"{size * group.size / 2**30:.3g} GiB: raise it, or set 0"
        )
    report = partial(progress, "host memory")
    return HostMemory(pool, num_slots, launched=partial(_launched, steps), report=report)


def _launched(steps: Executor | ThreadedExecutor) -> Callable[[], object]:
    """Return a function that waits until the steps that were launched so far have ended."""
    if isinstance(steps, ThreadedExecutor):
        return steps.thread.submit(int).result
    device = steps.step.device
    if device.type != "cuda":
        return int  # each has ended when its launch returns
    launched = torch.cuda.Event(blocking=True)
    launched.record(torch.cuda.current_stream(device))
    return launched.synchronize


class FollowedHost:
    """The host memory of a rank that follows rank 0, with what rank 0 may call."""

    def __init__(self, own: HostBlocks) -> None:
        self._own = own
        self._ended: deque[Exception | None] = deque()

    def calls(self) -> tuple[Callable[..., None], ...]:
        """Return what rank 0 may call."""
        return (self.store_blocks, self.load_blocks, self.await_copy, self.drain_copies)

    def store_blocks(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy blocks to slots."""
        self._own.store(blocks, slots)

    def load_blocks(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy slots to blocks."""
        self._own.load(blocks, slots)

    def await_copy(self, counts: int) -> None:
        """Wait for the oldest copy, so that the steps that follow may rely on it.

        If it ``counts``, it has succeeded on rank 0: raises what it raised here, for then this rank
        cannot go on.
        """
        if not self._ended:
            self._ended.extend(self._own.ended(wait=True))
        error = self._ended.popleft()
        if error is None:
            return
        if counts:
            raise error
        logger.warning("copying KV blocks failed: %r", error)

    def drain_copies(self) -> None:
        """Wait for all copies and forget them."""
        self._own.drain()
        self._ended.clear()


class LeadHost:
    """The host memory of all ranks: rank 0 copies, and the others copy the same blocks and slots.

    See HostBlocks for the methods.
    """

    def __init__(self, own: HostBlocks, followers: Followers) -> None:
        self._own, self._call = own, followers.call
        self.num_slots = own.num_slots

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy blocks to slots on all ranks."""
        self._own.store(blocks, slots)
        self._call(FollowedHost.store_blocks, blocks, slots)

    def load(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy slots to blocks on all ranks."""
        self._own.load(blocks, slots)
        self._call(FollowedHost.load_blocks, blocks, slots)

    def ended(self, *, wait: bool = False) -> Sequence[Exception | None]:
        """Return what the copies raised here that have ended; each other rank waits for its own."""
        ended = self._own.ended(wait=wait)
        for error in ended:
            self._call(FollowedHost.await_copy, int(error is None))
        return ended

    def drain(self) -> None:
        """Wait for all copies of all ranks and forget them."""
        self._own.drain()
        self._call(FollowedHost.drain_copies)
