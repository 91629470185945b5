"""The allocator of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """A free list over the block ids ``0 … num_blocks-1``.

    It knows no requests and no tensors: the scheduler assigns blocks to requests, and the runner
    owns the tensors that the ids index.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Last in, first out: a block freed just now is the most likely to be in a hardware cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """The number of allocated blocks."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks; None, and no change, if fewer are free."""
        if count > len(self._free):
            return None
        split = len(self._free) - count
        taken = self._free[split:]
        del self._free[split:]
        for block in taken:
            self._held[block] = 1
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Free blocks. Raises RuntimeError if one of them is not allocated."""
        for block in block_ids:
            if not (0 <= block < self.num_blocks and self._held[block]):
                raise RuntimeError(f"block {block} was freed but is not held: a double free")
            self._held[block] = 0
            self._free.append(block)

    def check_integrity(self) -> None:
        """Check that each block is either free or allocated, once. Raises RuntimeError if not."""
        if len(set(self._free)) != len(self._free):
            raise RuntimeError(f"the free list holds a block twice: {sorted(self._free)}")
        if sum(self._held) != self.num_held or any(self._held[block] for block in self._free):
            raise RuntimeError(
                f"{self.num_free} free and {sum(self._held)} held blocks do not make up the "
                f"pool's {self.num_blocks}"
            )
