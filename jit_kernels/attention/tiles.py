"""How prefill attention is cut into tiles: the host's side of ``attention_prefill/tiles.cuh``.

A tile is 128 rows (token, head of the group) of one request, and depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kiln.jit_kernels.attention.splits import KV_BLOCK, MOST_TOKENS

TILE_ROWS = 128
TILE_KEYS = 64
_RANGES = 16  # of weights, at most, in which tiles are put in order


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """What prefill attention needs beside its arguments: made once, shared by all layers.

    ``counter`` is zero between launches. One stream at a time may use a workspace.
    """

    group: int  # query heads a KV head
    items: Mapping[int, torch.Tensor]  # by window: [1 + capacity, 4] int32, a header, then tiles
    counter: torch.Tensor  # [1] int32

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Refuse a step that could need more than there is.

        Raises ValueError that names the numbers.
        """
        need = most_tiles(num_requests, num_tokens, self.group)
        has = min(items.shape[0] - 1 for items in self.items.values())
        if need > has:
            raise ValueError(
                f"the prefill workspace has room for {has} tiles; {num_requests} requests with "
                f"{num_tokens} tokens may need {need}"
            )


def make_prefill_workspace(
    *,
    max_requests: int,
    max_tokens: int,
    group: int,
    device: torch.device,
    windows: Sequence[int] = (0,),
) -> PrefillWorkspace:
    """Return a workspace for steps of at most these sizes. ``windows``: those in use, 0 for none.

    It takes 16 bytes for each 128 rows, a row being a token and one of a KV head's query heads.
    """
    rows = 1 + most_tiles(max_requests, max_tokens, group)
    items = {window: torch.zeros(rows, 4, dtype=torch.int32, device=device) for window in windows}
    return PrefillWorkspace(group, items, torch.zeros(1, dtype=torch.int32, device=device))


def serves(num_tokens: int) -> bool:
    """Return whether prefill attention serves a request of so many tokens in this step."""
    return num_tokens > MOST_TOKENS


def most_tiles(num_requests: int, num_tokens: int, group: int) -> int:
    """Return the most tiles, of one KV head, that a step of these sizes can have."""
    ends = min(num_requests, num_tokens // (MOST_TOKENS + 1))  # requests, each with a last tile
    return num_tokens * group // TILE_ROWS + ends


@dataclass(frozen=True, slots=True)
class Tiles:
    """One request's tiles: its query tokens, and the keys that each of them sees."""

    num_tokens: int
    seq_len: int
    group: int
    window: int

    @property
    def count(self) -> int:
        """How many tiles there are: none where decode attention serves the request."""
        return -(-self.num_tokens * self.group // TILE_ROWS) if serves(self.num_tokens) else 0

    def end(self, tile: int) -> int:
        """Return the end of the blocks of which a row of a tile sees a key."""
        last = min(self.num_tokens - 1, (tile * TILE_ROWS + TILE_ROWS - 1) // self.group)
        return -(-max(0, self._limit(last)) // KV_BLOCK)

    def begin(self, tile: int) -> int:
        """Return the first of these blocks; the end where there is none."""
        if not self.window:
            return 0
        first = self._limit(tile * TILE_ROWS // self.group)
        return min(max(0, first - self.window) // KV_BLOCK, self.end(tile))

    def weight(self, tile: int) -> int:
        """Return what a tile's keys cost; never less for a later tile."""
        if not self.window:
            return self.end(tile)
        return min(self.end(tile), (self.window + TILE_ROWS // self.group) // KV_BLOCK + 1)

    def _limit(self, token: int) -> int:
        return self.seq_len - self.num_tokens + token + 1


def ordered_tiles(requests: Sequence[Tiles]) -> list[tuple[int, int, int, int]]:
    """Return (request, tile, first block, end block) of all tiles, the heaviest first.

    Weights count in at most 16 equal ranges, as wide as a power of two; within one, requests keep
    their order.
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
