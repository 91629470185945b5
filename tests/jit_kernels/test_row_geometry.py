"""Launches cover all rows and elements, within what a grid can have."""

from __future__ import annotations

import pytest

from kiln.jit_kernels.declare.spec import DTYPES, HOST_GPU
from kiln.jit_kernels.ops.shared.row_geometry import row_geometry, team_size
from kiln.jit_kernels.registry import find_spec

BF16 = {"scalar_t": "kiln::bf16"}


@pytest.mark.parametrize("itemsize", [2, 4])
def test_teams_are_those_that_the_kernels_can_reduce_over(itemsize):
    for d in (*range(1, 3000), *range(3000, 40000, 97)):
        team, chunks = team_size(d, itemsize), -(-d * itemsize // 16)
        assert team in (16, 32, 64) or (team % 128 == 0 and team <= 1024)
        assert chunks <= 2 * team or team == 1024
        assert itemsize * 128 // 16 <= team or team >= 32  # a group of 128 elements is in one warp


@pytest.mark.parametrize("rows", [1, 7, 4096, 2**31 - 1])
@pytest.mark.parametrize("d", [64, 4096])
def test_every_row_has_a_team(rows, d):
    launch = row_geometry(BF16, {"rows": rows, "d": d}, HOST_GPU)
    assert launch.grid[0] * launch.block[1] >= rows > (launch.grid[0] - 1) * launch.block[1]


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="more than one launch"):
        row_geometry(BF16, {"rows": 2**31, "d": 4096}, HOST_GPU)


@pytest.mark.parametrize("scalar", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 65535, 65536, 200_000, 2**31])
@pytest.mark.parametrize("d", [1, 7, 256, 14336])
def test_the_activations_grid_covers_all_elements(scalar, rows, d):
    variant = {"scalar_t": scalar, "activation": "silu"}
    spec = find_spec("silu_and_mul")
    (across, down, deep), block, _ = (
        getattr(spec.geometry(variant, {"rows": rows, "d": d}, HOST_GPU), name)
        for name in ("grid", "block", "shared_bytes")
    )
    assert down <= 65535
    assert deep <= 65535
    assert block[0] * block[1] == 128
    assert down * deep * block[1] >= rows
    assert across * block[0] * 2 * 8 // DTYPES[scalar].itemsize >= d
