"""All-reduce among processes that share one GPU: CUDA IPC, without a link between GPUs.

The processes take turns on the GPU, and a kernel that waits uses up its turn, so nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from gpu.pace import Pace, Row
from gpu.ranks import ONE_GPU, run_job

_WORLDS = (2, 4)
_JOBS = ("bits", "rounds", "skipped")
_SECONDS = 40.0  # of a job


def ipc(args: argparse.Namespace) -> list[Row]:
    """Return rows of the jobs of ``rank_checks`` for each number of processes."""
    return Pace(args, seconds=110).rows(_WORLDS, lambda world: f"{world} processes", _of_world)


def _of_world(world: int, where: str = ONE_GPU) -> Iterator[Row]:
    for job in _JOBS:
        for row in run_job(f"gpu.rank_checks:{job}", world, where, quick=True, seconds=_SECONDS):
            yield {"kernel": f"{world} processes", "job": job, **row}
