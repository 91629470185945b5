"""How lora_shrink splits its sums: only the size of a row sets the order of the additions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kiln.jit_kernels.ops.lora.tiles import SMALL

COLUMNS = 16  # of h in a block: kColumns in parts.cuh
SLICES = 8  # of a row of A: kSlices in lora_shrink.cu
_MOST_WARPS = 8


class Workspace(NamedTuple):
    """Where blocks leave the sums of slices for the one that adds them up.

    ``partials``: float32; ``arrivals``: int32, zeros between launches. Only one stream at a time
    may use a workspace.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor


def make_workspace(tiles: int, width: int, device: torch.device | str) -> Workspace:
    """Return a workspace for up to so many small tiles, with up to ``width`` columns of h."""
    blocks = tiles * -(-width // COLUMNS)
    partials = torch.empty(blocks * SLICES * SMALL * COLUMNS, device=device)
    return Workspace(partials, torch.zeros(blocks, dtype=torch.int32, device=device))


def warps_of_slice(input_size: int) -> int:
    """Return the warps that share a slice, one for each 128 elements."""
    return min(max(-(-input_size // (128 * SLICES)), 1), _MOST_WARPS)


def spread_of(tile: int) -> int:
    """Return the blocks that share the columns of a tile: of few tokens, a block has one slice."""
    return SLICES if tile == SMALL else 1


def threads_of(input_size: int, tile: int) -> int:
    """Return the threads of a block: for a slice, or for one warp per slice."""
    return 32 * (warps_of_slice(input_size) if spread_of(tile) == SLICES else SLICES)


def sums_at_once(input_size: int, tile: int) -> int:
    """Return for how many warps and slices a block keeps sums in shared memory."""
    warps = threads_of(input_size, tile) // 32
    of_slices = 0 if spread_of(tile) == SLICES else SLICES
    return warps + of_slices
