"""How many threads share a row, for the kernels that include kiln/rows/rows.cuh."""

from __future__ import annotations

from kiln.jit_kernels.spec import DTYPES, Gpu, LaunchGeometry, Sizes, Variant

_CHUNKS = 2  # 16-byte pieces that a thread of a team holds: kChunks of the sources in kiln/*.cuh
_GROUP = 128  # elements that share a scale, whose threads must lie in one warp
_MAX_TEAM = 1024
_STEP = 128  # threads by which wide teams grow: their warps are reduced by fours
_BLOCK = 128  # threads of a block that several rows share
_MAX_BLOCKS = 2**31 - 1


def team_size(d: int, itemsize: int) -> int:
    """Return the threads that share a row of d elements: all that its summation order depends on.

    A thread gets up to two pieces of 16 bytes, both loaded at once; a row as many threads as that
    takes. Rows of up to 64 pieces have a warp, or half of one, and need no barrier. Those of up to
    128 have a piece a thread: a launch of few rows is over sooner.
    """
    per_chunk = 16 // itemsize
    chunks, half_warp = -(-d // per_chunk), _GROUP // per_chunk
    if chunks <= half_warp:
        return half_warp
    if chunks <= _CHUNKS * 32:
        return 32
    return min(-(-chunks // (_CHUNKS * _STEP)) * _STEP, _MAX_TEAM)


def row_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return a team a row; teams of a warp or less share blocks where rows fill the GPU.

    Raises ValueError for more rows than a grid can have.
    """
    team = team_size(sizes["d"], DTYPES[variant["scalar_t"]].itemsize)
    return _geometry(sizes, gpu, team)


def doubled_row_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return half as many threads a row: each does what two of a team do, in the same order.

    What is done once a thread, whatever its share, then costs half. For a kernel whose source holds
    twice the pieces a thread.

    Raises ValueError for more rows than a grid can have.
    """
    team = team_size(sizes["d"], DTYPES[variant["scalar_t"]].itemsize)
    return _geometry(sizes, gpu, max(team // 2, 16))


def _geometry(sizes: Sizes, gpu: Gpu, team: int) -> LaunchGeometry:
    rows = sizes["rows"]
    if rows > _MAX_BLOCKS:
        raise ValueError(f"{rows} rows of {sizes['d']} are more than one launch can take")
    teams = max(32 // team, 1)
    if team <= 32 and rows > gpu.num_multiprocessors * (_BLOCK // 32) * teams:
        teams = _BLOCK // team
    return LaunchGeometry((-(-rows // teams), 1, 1), (team, teams, 1))
