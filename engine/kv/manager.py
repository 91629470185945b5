"""Assigns KV blocks to requests, and reuses those whose keys and values are known already."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

from kiln.engine.errors import too_long
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.host_tier import HostTier
from kiln.engine.requests.prefix import Key, Tail
from kiln.engine.requests.request import Request


class Prefix(NamedTuple):
    """The blocks that hold the beginning of a waiting request; without caching no ``tail``."""

    blocks: list[int]
    tail: Tail | None


class KVManager:
    """Allocates KV blocks for the tokens of requests.

    ``block_size`` is in tokens. A request keeps its blocks until ``release``, even if the step
    that needed them fails: the next ``extend`` reuses them. With ``caching``, full blocks are
    indexed once they are computed, and requests that begin with the same tokens share them. At
    least the last token of a request is always computed, so nothing writes to a shared block.
    With a ``tier`` those that were evicted come back from the host.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        caching: bool = False,
        tier: HostTier | None = None,
    ) -> None:
        self.pool = pool
        self.tier = tier
        self.block_size = block_size
        self.caching = caching
        self._computing: dict[Key, Request] = {}  # by the next full block of their prompts
        self.num_queried = self.num_hit = 0  # tokens of prompts, looked up and found

    @property
    def capacity(self) -> int:
        """The capacity of the pool in tokens."""
        return self.pool.num_blocks * self.block_size

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way from the host."""
        return self.tier is not None and self.tier.is_loading

    def check(self, num_tokens: int) -> None:
        """Refuse a prompt that does not fit in the whole pool. Raises ContextLengthError."""
        if num_tokens > self.capacity:
            raise too_long(
                self.capacity,
                f"the prompt has {num_tokens} tokens, and the KV pool holds {self.capacity} "
                f"({self.pool.num_blocks} blocks of {self.block_size}): shorten it, or serve with "
                "more blocks",
            )

    def room(self, request: Request) -> int:
        """Return how many tokens fit in a request's own blocks plus the available ones.

        If there are none, blocks that are held for waiting requests become available.
        """
        if self.tier is not None and not self.pool.num_available:
            self.tier.give_way(wait=True)
        return (len(request.block_ids) + self.pool.num_available) * self.block_size

    def prefix(self, request: Request, spare_blocks: int = 0) -> Prefix | None:
        """Return the longest known beginning of a waiting request.

        None: a running request computes most of what this one needs, or it is on its way from the
        host; ask again after a step. Nothing is loaded that does not fit, as for ``fits``.
        """
        if not self.caching:
            return Prefix([], None)
        if request.prefix.awaits_leader:
            return None
        wanted = self._pieces(request, 0, request.num_cacheable // self.block_size)
        blocks, tail = self.pool.index.find(request.prefix.root, wanted)
        if self.tier is not None and (known := self.tier.num_on_device(blocks)) < len(blocks):
            if self._awaits_host(request, blocks, known, spare_blocks):
                return None
            blocks = blocks[:known]
            tail = self.pool.index.tail(request.prefix.root, blocks)
        if tail.length < len(wanted) and self._finds_leader(request, tail, wanted):
            return None
        return Prefix(blocks, tail)

    def fits(self, request: Request, prefix: Prefix, spare_blocks: int) -> bool:
        """Whether a waiting request's tokens fit and leave ``spare_blocks`` blocks available."""
        wanted = self._blocks_for(len(request.token_ids)) - len(prefix.blocks) + spare_blocks
        while wanted + self.pool.count_idle(prefix.blocks) > self.pool.num_available:
            if self.tier is None or not self.tier.give_way(request):
                return False
        return True

    def begin(self, request: Request, prefix: Prefix, *, is_first: bool = True) -> None:
        """Give a request that begins to run its known blocks, which count as computed.

        ``is_first``: it was not preempted before.
        """
        self.pool.share(prefix.blocks)
        if self.tier is not None:
            self.tier.drop(request)
            request.prefix.num_loads = 0
        request.block_ids = [*prefix.blocks]
        request.num_computed_tokens = len(prefix.blocks) * self.block_size
        if prefix.tail is None:
            return
        self._follow(request, prefix.tail)
        if is_first:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queried += request.num_prompt_tokens
            self.num_hit += request.num_cached_tokens

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the first ``num_tokens`` of a request; all or nothing (False)."""
        missing = self._blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            request.block_ids += blocks
        return True

    def index(self, request: Request, num_tokens: int) -> None:
        """Index the full blocks of the first ``num_tokens`` tokens, which have been computed."""
        tail, end = request.prefix.tail, num_tokens // self.block_size
        if tail is not None and tail.length < end:
            pieces = self._pieces(request, tail.length, end)
            blocks = request.block_ids[tail.length : end]
            tail = self.pool.index.add(tail, pieces, blocks)
            if self.tier is not None:
                self.tier.keep(blocks)
        self._follow(request, tail)

    def release(self, request: Request) -> None:
        """Free all blocks of a request; of what stays known, its end is the first to go."""
        self.pool.free(reversed(request.block_ids))
        if self.tier is not None:
            self.tier.drop(request)
            self.tier.touch(reversed(request.block_ids))
        request.block_ids = []  # a new list: the running batch still reads the old one
        self._follow(request, None)

    def forget_prefixes(self) -> None:
        """Forget what all blocks hold. Requests keep their own."""
        for request in tuple(self._computing.values()):
            self._follow(request, None)
        if self.tier is not None:
            self.tier.forget_all()
        self.pool.forget_all()

    def collect(self, *, wait: bool = False) -> None:
        """Take note of blocks that have come from the host, and store others there.

        With ``wait``, first wait until some have come, if any are on their way.
        """
        if self.tier is not None:
            self.tier.collect(wait=wait)

    def give_way(self) -> None:
        """Hold no blocks for waiting requests; first wait for those that are on their way."""
        if self.tier is not None:
            self.tier.give_way(wait=True)

    def clear(self) -> None:
        """Make every block free, whoever held it."""
        self.pool = BlockPool(self.pool.num_blocks, 0 if self.tier is None else self.tier.num_slots)
        if self.tier is not None:
            self.tier.restart(self.pool)
        self._computing.clear()

    def _awaits_host(
        self, request: Request, places: list[int], known: int, spare_blocks: int
    ) -> bool:
        """Whether a request's blocks behind the ``known`` ones come from the host, from now on."""
        assert self.tier is not None
        rest = places[known:]
        if self.tier.is_coming(rest):
            return True
        if not self.tier.is_worth_loading(request, rest):
            return False
        if not self.fits(request, Prefix(places[:known], None), spare_blocks):
            return False
        self.tier.load(request, places)
        return True

    def _finds_leader(self, request: Request, tail: Tail, wanted: Sequence[bytes]) -> bool:
        """Find a request that computes at least half of what this one lacks, and await it."""
        leader = self._computing.get((tail.uid, wanted[tail.length]))
        if leader is None:
            return False
        shared = tail.length
        most = min(len(wanted), len(leader.token_ids) // self.block_size)
        for own, other in zip(wanted[shared:], self._pieces(leader, shared, most), strict=False):
            if own != other:
                break
            shared += 1
        missing = len(request.token_ids) - tail.length * self.block_size
        if 2 * (shared - tail.length) * self.block_size < missing:
            return False
        request.prefix.leader = leader.prefix, shared
        return True

    def _follow(self, request: Request, tail: Tail | None) -> None:
        """Note where the indexed blocks of a running request end, and the block that comes next."""
        state = request.prefix
        if state.next_key is not None:
            del self._computing[state.next_key]
        state.tail, state.next_key, state.index_at = tail, None, sys.maxsize
        if tail is None:
            return
        state.index_at = (tail.length + 1) * self.block_size
        if state.index_at <= len(request.token_ids):
            (tokens,) = self._pieces(request, tail.length, tail.length + 1)
            key = tail.uid, tokens
            if self._computing.setdefault(key, request) is request:
                state.next_key = key

    def _pieces(self, request: Request, start: int, end: int) -> list[bytes]:
        """Return the tokens of a request's full blocks, as the index has them, int32."""
        size = self.block_size
        tokens = request.token_ids[start * size : end * size]
        packed, width = struct.pack(f"{len(tokens)}i", *tokens), 4 * size
        return [packed[at : at + width] for at in range(0, len(packed), width)]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
