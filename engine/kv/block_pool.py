"""The allocator of KV blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kiln.engine.kv.prefix_index import PrefixIndex


class BlockPool:
    """The block ids ``0 … num_blocks-1``, and how many requests hold each of them.

        free    its contents do not matter
        held    by one request, or by several with the same prefix
        idle    held by none, but indexed: its contents are kept until the block is needed

    Free blocks are allocated first, then idle ones, the least recently used first. The pool knows
    no requests and no tensors: the scheduler assigns blocks to requests, and the runner owns the
    tensors that the ids index. ``num_slots``: host slots of the host tier, which the index knows.
    """

    def __init__(self, num_blocks: int, num_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks, num_slots)
        # Last in, first out: a block freed just now is the most likely to be in a hardware cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._holders = [0] * num_blocks

    @property
    def num_available(self) -> int:
        """The number of free and idle blocks, which can be allocated."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """The number of idle blocks."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """The number of blocks that requests hold."""
        return self.num_blocks - self.num_available

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of the blocks are idle."""
        holders = self._holders
        return sum(not holders[block] for block in blocks)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks; None, and no change, if fewer are available."""
        if count > self.num_available:
            return None
        split = max(len(self._free) - count, 0)
        taken = self._free[split:]
        del self._free[split:]
        while len(taken) < count:
            block, _ = self._idle.popitem(last=False)
            self.index.forget(block)
            taken.append(block)
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold indexed blocks for one more request."""
        for block in block_ids:
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one hold of each block, the one to be reused first in front.

        Raises RuntimeError if one of them is not held.
        """
        holders, index = self._holders, self.index
        for block in block_ids:
            if not (0 <= block < self.num_blocks and holders[block]):
                raise RuntimeError(f"block {block} was freed but is not held: a double free")
            holders[block] -= 1
            if not holders[block]:
                if block in index:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def forget_all(self) -> None:
        """Forget the contents of all blocks; those that are held stay held."""
        self._free.extend(self._idle)
        self._idle.clear()
        self.index.clear()

    def check_integrity(self) -> None:
        """Check that each block is free, held or idle, and in one place. Raises RuntimeError."""
        held = {block for block, count in enumerate(self._holders) if count}
        places = [*self._free, *self._idle, *held]
        if sorted(places) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"{len(self._free)} free, {len(self._idle)} idle and {len(held)} held blocks are "
                f"not the pool's {self.num_blocks}, each once"
            )
        if wrong := [block for block in self._free if block in self.index]:
            raise RuntimeError(f"the blocks {wrong} are free and indexed")
        if wrong := [block for block in self._idle if block not in self.index]:
            raise RuntimeError(f"the blocks {wrong} are idle and not indexed")
