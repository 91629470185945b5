"""Sums with known results, before the first real one: by the kernels, through all links."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.engine.distributed.all_reduce_plan import Plan
from kiln.engine.distributed.late_rank import LateRecord
from kiln.engine.distributed.peer_handshake import Exchange, problem_of_all
from kiln.engine.errors import CustomAllReduceTimeout
from kiln.jit_kernels.ops.all_reduce.functions import all_reduce
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, Algorithm
from kiln.jit_kernels.ops.all_reduce.members import Members

_ROUNDS = 2  # the phases of a buffer
_SIZES = (1031, 16384)  # elements; the first is no whole number of vectors


def prove_sums(
    members: Members,
    plan: Plan,
    dtypes: Sequence[torch.dtype],
    exchange: Exchange,
    record: LateRecord,
) -> str:
    """Return why some sum is wrong on some rank, the same text on all ranks; "" if none is."""
    problem = ""
    try:
        wrong = [
            f"{algorithm} of {n} {dtype} elements"
            for algorithm in ALGORITHMS
            if plan.forced in ("auto", algorithm)
            for dtype in dtypes
            for n in _SIZES
            if n * dtype.itemsize <= members.layout.limit(algorithm)
            for turn in range(_ROUNDS)
            if not _is_right(members, algorithm, dtype, n, turn)
        ]
        record.check()
        if wrong:
            problem = f"wrong sums: {', '.join(dict.fromkeys(wrong))}"
    except CustomAllReduceTimeout as error:
        problem = str(error)
    return problem_of_all(exchange, problem)


def _is_right(
    members: Members, algorithm: Algorithm, dtype: torch.dtype, n: int, turn: int
) -> bool:
    """Sum integers that differ between ranks, and compare bits; waits for the device."""
    device, world = members.buffers.device, members.layout.world
    own = message(members.first_rank, n, turn, dtype, device)
    found = all_reduce(own.unsqueeze(0), members, algorithm)
    return torch.equal(found[0], expected(world, n, turn, dtype, device))


def expected(
    world: int, n: int, turn: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the sum of the ranks' messages, [n], in float32 and in their order, rounded once."""
    total = message(0, n, turn, dtype, device).float()
    for rank in range(1, world):
        total = total + message(rank, n, turn, dtype, device).float()
    return total.to(dtype)


def message(rank: int, n: int, turn: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a message [n] of small integers, which every dtype holds exactly."""
    places = torch.arange(n, device=device)
    return ((places * (2 * rank + 3) + 7 * turn + rank) % 61 - 30).to(dtype)
