"""Which blocks of the KV pool each request holds."""

from __future__ import annotations

from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.request import Request


class KVManager:
    """Gives requests the blocks that their tokens need, out of a pool.

    ``block_size`` is in tokens. A request keeps what ``extend`` gave it until ``release``, also
    when the step that the blocks were for fails: the next ``extend`` finds them there.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    @property
    def capacity(self) -> int:
        """How many tokens the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    def room(self, request: Request) -> int:
        """Return how many tokens a request may have in all, with its own and the free blocks."""
        return (len(request.block_ids) + self.pool.num_free) * self.block_size

    def fits(self, num_tokens: int, spare_blocks: int) -> bool:
        """Whether the tokens of one more request fit, and so many blocks are free afterwards."""
        return self._blocks_for(num_tokens) + spare_blocks <= self.pool.num_free

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Make room for the first ``num_tokens`` of a request; False, and nothing, if none is."""
        missing = self._blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            request.block_ids += blocks
        return True

    def release(self, request: Request) -> None:
        """Free all blocks of a request."""
        self.pool.free(request.block_ids)
        request.block_ids = []  # a new list: the batch that runs now still reads the old one

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
