"""Assigns KV blocks to requests."""

from __future__ import annotations

from kiln.engine.errors import RequestError
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.requests.request import Request


class KVManager:
    """Allocates KV blocks for the tokens of requests.

    ``block_size`` is in tokens. A request keeps its blocks until ``release``, even if the step
    that needed them fails: the next ``extend`` reuses them.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    @property
    def capacity(self) -> int:
        """The capacity of the pool in tokens."""
        return self.pool.num_blocks * self.block_size

    def check(self, num_tokens: int) -> None:
        """Refuse a prompt that does not fit in the whole pool. Raises RequestError."""
        if num_tokens > self.capacity:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the KV pool holds {self.capacity} "
                f"({self.pool.num_blocks} blocks of {self.block_size}): shorten it, or serve with "
                "more blocks",
                "prompt",
            )

    def room(self, request: Request) -> int:
        """Return how many tokens fit in a request's own blocks plus the free ones."""
        return (len(request.block_ids) + self.pool.num_free) * self.block_size

    def fits(self, num_tokens: int, spare_blocks: int) -> bool:
        """Whether a new request's tokens fit and leave ``spare_blocks`` blocks free."""
        return self._blocks_for(num_tokens) + spare_blocks <= self.pool.num_free

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the first ``num_tokens`` of a request; all or nothing (False)."""
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
        request.block_ids = []  # a new list: the running batch still reads the old one

    def clear(self) -> None:
        """Make every block free, whoever held it."""
        self.pool = BlockPool(self.pool.num_blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
