"""Threads per row for the kernels that include kiln/rows/rows.cuh, and a thread for each item."""

from __future__ import annotations

from collections.abc import Callable

from kiln.jit_kernels.declare.spec import DTYPES, Gpu, LaunchGeometry, Sizes, Variant

_CHUNKS = 2  # 16-byte chunks per thread: kChunks in kiln/*.cuh
_GROUP = 128  # elements that share a scale; their threads must be in one warp
_MAX_TEAM = 1024
_STEP = 128  # wide teams are multiples of this, because their warps are reduced by fours
_BLOCK = 128  # threads of a block that is shared by several rows or items
_MAX_BLOCKS = 2**31 - 1


def team_size(d: int, itemsize: int) -> int:
    """Return the threads that share a row of d elements. Only this sets the summation order.

    A thread loads up to two chunks of 16 bytes at once. Rows of up to 64 chunks use a warp or half
    a warp and need no barrier. Rows of up to 128 chunks use one thread per chunk, which is faster
    for few rows.
    """
    per_chunk = 16 // itemsize
    chunks, half_warp = -(-d // per_chunk), _GROUP // per_chunk
    if chunks <= half_warp:
        return half_warp
    if chunks <= _CHUNKS * 32:
        return 32
    return min(-(-chunks // (_CHUNKS * _STEP)) * _STEP, _MAX_TEAM)


def row_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return one team per row; teams of at most a warp share blocks if the rows fill the GPU.

    Raises ValueError for more rows than a grid can have.
    """
    team = team_size(sizes["d"], DTYPES[variant["scalar_t"]].itemsize)
    return _geometry(sizes, gpu, team)


def doubled_row_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return half as many threads per row; each does the work of two, in the same order.

    This halves the cost of the work that each thread does once. The kernel's source must hold twice
    the chunks per thread. Raises ValueError for more rows than a grid can have.
    """
    team = team_size(sizes["d"], DTYPES[variant["scalar_t"]].itemsize)
    return _geometry(sizes, gpu, max(team // 2, 16))


def thread_for_each(items: str) -> Callable[[Variant, Sizes, Gpu], LaunchGeometry]:
    """Return the geometry of a thread for each of ``sizes[items]`` items, at least one block."""

    def geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
        return LaunchGeometry((max(-(-sizes[items] // _BLOCK), 1), 1, 1), (_BLOCK, 1, 1))

    return geometry


def _geometry(sizes: Sizes, gpu: Gpu, team: int) -> LaunchGeometry:
    rows = sizes["rows"]
    if rows > _MAX_BLOCKS:
        raise ValueError(f"{rows} rows of {sizes['d']}: more than one launch supports")
    teams = max(32 // team, 1)
    if team <= 32 and rows > gpu.num_multiprocessors * (_BLOCK // 32) * teams:
        teams = _BLOCK // team
    return LaunchGeometry((-(-rows // teams), 1, 1), (team, teams, 1))
