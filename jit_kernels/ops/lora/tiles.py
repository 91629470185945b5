"""Tiles: the tokens of a step in groups of one adapter, which is how the LoRA kernels read them.

A tile has its adapter's slot, and up to ``tile`` tokens, -1 behind the last. What a block loads of
the adapter serves the whole tile, wherever its tokens are in the step. A row's bits do not depend
on its tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

SMALL, LARGE = 16, 32  # tokens of a tile: the columns of two mma, or of four
MOST_SMALL = 256  # steps of more tokens have prompts, whose tokens have one adapter


class Tiles(NamedTuple):
    """``slots``: [tiles] int32, -1 for an empty tile; ``tokens``: [tiles, tile] int32."""

    slots: torch.Tensor
    tokens: torch.Tensor


def tile_of(tokens: int) -> int:
    """Return the tokens of a tile for steps of so many tokens."""
    return SMALL if tokens <= MOST_SMALL else LARGE


def num_tiles(tokens: int, num_slots: int) -> int:
    """Return the most tiles that a step can need, with tokens of any adapters."""
    tile = tile_of(tokens)
    return min(tokens, (tokens + min(num_slots, tokens) * (tile - 1)) // tile)


def num_elements(tokens: int, num_slots: int) -> int:
    """Return the int32 elements of the tiles for a step, in one array."""
    return num_tiles(tokens, num_slots) * (1 + tile_of(tokens))


def tiles_in(numbers: torch.Tensor, tokens: int, num_slots: int) -> Tiles:
    """Return the tiles that ``fill_tiles`` wrote to [num_elements] int32."""
    tiles = num_tiles(tokens, num_slots)
    return Tiles(numbers[:tiles], numbers[tiles:].view(tiles, tile_of(tokens)))


def fill_tiles(numbers: np.ndarray, slots: np.ndarray, tokens: int, num_slots: int) -> None:
    """Write the tiles of a step of at most ``tokens`` tokens to [num_elements] int32.

    slots: the adapter slot of each token, -1 for none; tokens behind the last have none.
    """
    numbers.fill(-1)
    tiles, tile = num_tiles(tokens, num_slots), tile_of(tokens)
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    if not len(order):
        return
    ordered = slots[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(starts, append=len(order))
    first = np.cumsum(-(-lengths // tile)) - -(-lengths // tile)  # the first tile of each adapter
    within = np.arange(len(order)) - np.repeat(starts, lengths)
    places = np.repeat(first * tile, lengths) + within
    numbers[tiles + places] = order
    numbers[places // tile] = ordered
