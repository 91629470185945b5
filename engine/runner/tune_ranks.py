"""Measure the sums over the ranks of this machine: ``kiln warmup --tune-comm``.

``tune_ranks`` starts a process for each rank, as a server does; ``main`` runs in those of the other
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kiln.engine.distributed.connect import connect_while
from kiln.engine.distributed.custom_all_reduce import CustomAllReduceV2
from kiln.engine.distributed.followers import Followers
from kiln.engine.distributed.group import Group
from kiln.engine.distributed.inbox import Inbox
from kiln.engine.distributed.tuner import FEW_SIZES, SIZES, Tuned
from kiln.engine.runner.device import resolve_rank_device
from kiln.engine.runner.load import connect_spawned, meeting

_WATCHDOG_MS = 60_000  # kernels may be compiled between two sums
_MODULE = "kiln.engine.runner.tune_ranks"


def tune_ranks(world: int, device: str, dtype: torch.dtype) -> tuple[Tuned, Path]:
    """Return what was measured among ``world`` ranks, and the file that it is kept in.

    Raises ConfigError if the ranks cannot use Kiln's kernels, DeviceError if one of them is gone.
    """
    own = resolve_rank_device(device, 0, world)
    sizes = SIZES if own.type == "cuda" else FEW_SIZES
    followers = Followers.spawn(world, _MODULE)
    group = None
    try:
        told = meeting(followers, own)
        told |= {"device": device, "dtype": str(dtype).removeprefix("torch."), "sizes": sizes}
        followers.start(told)
        group = connect_while(followers.check, partial(connect_spawned, told, 0, device))
        followers.use_abort(group.abort)
        tuned, path = _tune(group, dtype, sizes)
        assert path is not None
        return tuned, path
    except Exception as error:
        raise followers.blame(error) from error
    finally:
        followers.stop()
        if group is not None:
            group.close()
        followers.close()


def main(arguments: list[str]) -> int:
    """Take part as the rank that the first argument names; the second is rank 0's address."""
    rank = int(arguments[0])
    inbox = Inbox(arguments[1], rank)

    def work(told: dict[str, Any]) -> Group:
        torch.set_num_threads(told["threads"])
        group = connect_spawned(told, rank, told["device"])
        _tune(group, getattr(torch, told["dtype"]), told["sizes"])
        inbox.next()  # STOP
        return group

    return inbox.run(work)


def _tune(group: Group, dtype: torch.dtype, sizes: Sequence[int]) -> tuple[Tuned, Path | None]:
    """Measure on all ranks; return the file too on rank 0, which alone writes it."""
    kernels = CustomAllReduceV2(group, group.device, dtypes=(dtype,), watchdog_ms=_WATCHDOG_MS)
    try:
        tuned = kernels.tune(sizes, dtype)
        return tuned, kernels.store(tuned) if group.rank == 0 else None
    finally:
        kernels.close()
