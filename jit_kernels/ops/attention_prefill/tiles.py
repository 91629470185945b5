"""How prefill attention is cut into tiles: the host's side of ``attention_prefill/tiles.cuh``.

A tile is 128 rows (token, query head of the group) of one request. It depends on no other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kiln.jit_kernels.ops.attention.variants import KV_BLOCK, MOST_TOKENS
from kiln.jit_kernels.ops.attention.visible import first_visible

TILE_ROWS = 128
TILE_KEYS = 64
_RANGES = 16  # maximum: tiles are sorted by the range of their weight


def is_prefill(num_tokens: int) -> bool:
    """Return whether prefill attention serves a request with this many query tokens."""
    return num_tokens > MOST_TOKENS


def most_tiles(num_requests: int, num_tokens: int, group: int) -> int:
    """Return the maximum number of tiles per KV head in a step of these sizes."""
    ends = min(num_requests, num_tokens // (MOST_TOKENS + 1))  # requests, each with a last tile
    return num_tokens * group // TILE_ROWS + ends


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one request, and the keys that each of their rows sees."""

    num_tokens: int
    seq_len: int
    group: int
    window: int

    @property
    def count(self) -> int:
        """The number of tiles; 0 if decode attention serves the request."""
        return -(-self.num_tokens * self.group // TILE_ROWS) if is_prefill(self.num_tokens) else 0

    def end(self, tile: int) -> int:
        """Return the end of the range of blocks that some row of a tile sees."""
        last = min(self.num_tokens - 1, (tile * TILE_ROWS + TILE_ROWS - 1) // self.group)
        return -(-max(0, self._limit(last)) // KV_BLOCK)

    def begin(self, tile: int) -> int:
        """Return the first of these blocks; the end if there is none."""
        first = first_visible(self._limit(tile * TILE_ROWS // self.group), self.window)
        return min(max(0, first) // KV_BLOCK, self.end(tile))

    def weight(self, tile: int) -> int:
        """Return roughly how many KV blocks a tile reads; it never falls from tile to tile."""
        if not self.window:
            return self.end(tile)
        return min(self.end(tile), (abs(self.window) + TILE_ROWS // self.group) // KV_BLOCK + 1)

    def _limit(self, token: int) -> int:
        return self.seq_len - self.num_tokens + token + 1


def ordered_tiles(requests: Sequence[Tiles]) -> list[tuple[int, int, int, int]]:
    """Return (request, tile, first block, end block) of all tiles, heaviest first.

    Tiles are sorted by ranges of weight: at most 16 ranges, all of one power-of-two width. Within a
    range requests keep their order.
    """
    most = max((one.weight(one.count - 1) for one in requests if one.count), default=0)
    shift = max(0, most.bit_length() - _RANGES.bit_length() + 1)
    ranked = [
        (-(one.weight(tile) >> shift), request, -tile)
        for request, one in enumerate(requests)
        for tile in range(one.count)
    ]
    return [
        (request, -tile, requests[request].begin(-tile), requests[request].end(-tile))
        for _, request, tile in sorted(ranked)
    ]
