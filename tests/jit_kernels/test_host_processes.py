"""Kernels on a CPU that wait for ranks in other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rank_kernels import COUNT, build, count, ring
from rank_processes import Ranks

from kiln.jit_kernels.declare.errors import HostFault, LaunchError
from kiln.jit_kernels.toolchains.host_world import World


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as processes:
        yield processes


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_hand_data_over_round_by_round(ranks, world):
    told = ranks.call(ring, [(100, -1, 60_000)] * world)
    for rank, (heard, _) in enumerate(told):
        after = (rank + 1) % world
        for number, words in enumerate(heard, 1):
            assert words == [number * 1000 + after * 100 + thread for thread in range(32)]


def test_a_limit_on_waiting_is_one_of_real_time(ranks):
    (_, late), _, (_, seconds) = ranks.call(ring, [(3, 1, 300)] * 3)
    assert late >= 0.3
    assert seconds >= 0


def test_atomics_of_several_processes_lose_nothing(ranks):
    times, threads = 2000, 64
    total = 3 * threads * times
    words, *others = ranks.call(count, [(times,)] * 3)
    assert words[:2] == [total, total % 7]
    assert words[3:] == [2000 + times - 1, 3 * total]
    assert torch.tensor(words, dtype=torch.int32).view(torch.float32)[2] == total
    assert others == [[0] * 5] * 2
