"""Kernels on a CPU that wait for ranks in other processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from rank_kernels import (
    COUNT,
    COUNT_TYPES,
    RING,
    RING_TYPES,
    build,
    count,
    die_in_the_middle,
    fused,
    launch,
    ring,
    skip_a_call,
    sums,
)
from rank_processes import RankFailed, Ranks

from kiln.jit_kernels.declare.errors import HostFault, LaunchError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, Layout
from kiln.jit_kernels.ops.all_reduce.members import virtual_members
from kiln.jit_kernels.ops.all_reduce.spec import BY_ALGORITHM
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as processes:
        yield processes


# ---- the runtime -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_hand_data_over_round_by_round(ranks, world):
    for rank, heard in enumerate(ranks.call(ring, [(100,)] * world)):
        after = (rank + 1) % world
        for number, words in enumerate(heard, 1):
            assert words == [number * 1000 + after * 100 + thread for thread in range(32)]


def test_atomics_of_several_processes_lose_nothing(ranks):
    times, threads = 2000, 64
    total = 3 * threads * times
    words, *others = ranks.call(count, [(times,)] * 3)
    assert words[:2] == [total, total % 7]
    assert words[3:] == [2000 + times - 1, 3 * total]
    assert torch.tensor(words, dtype=torch.int32).view(torch.float32)[2] == total
    assert others == [[0] * 5] * 2


def test_waiting_for_another_process_is_no_deadlock_but_ends_at_the_time_limit():
    own, peers = torch.zeros(2048, dtype=torch.uint8), torch.tensor([0, 0])
    values = (own, peers, torch.zeros(32, dtype=torch.int32), 2, 0, 2)
    late = RING.replace("flag + there, round)", "flag + there, round - 1)")
    assert late != RING
    with pytest.raises(HostFault, match=r"time limit\n.*polling at ring.cu:10, value 1"):
        launch(build(late, "ring", *RING_TYPES), values, 32, seconds=0.2)
    launch(build(RING, "ring", *RING_TYPES), values, 32)


VECTORS = """
#include "kiln/ptx/memory.cuh"
extern "C" __global__ void meet(uint8_t* words) {
  uint32_t w[4] = {0, 0, 0, 0};
  if (threadIdx.x + blockIdx.x == 0)
    while (w[1] == 0) kiln::load_words_relaxed<kiln::Scope::sys>(w, words);
  else
    kiln::store_relaxed<kiln::Scope::sys>(reinterpret_cast<uint32_t*>(words) + 1, 1);
}
"""


@pytest.mark.parametrize(("threads", "blocks"), [(2, 1), (1, 2)])
def test_a_thread_that_polls_several_words_lets_others_run(threads, blocks):
    kernel, words = build(VECTORS, "meet", "pointer"), torch.zeros(16, dtype=torch.uint8)
    launch(kernel, (words,), threads, blocks, seconds=5)
    assert words[4] == 1


def test_threads_that_wait_for_each_other_are_a_deadlock():
    body = "if (threadIdx.x < 16) __syncwarp(); else __syncthreads();"
    kernel = build(
        COUNT.replace("uint32_t* words =", f"{body}\nuint32_t* words ="), "count", *COUNT_TYPES
    )
    with pytest.raises(HostFault, match="deadlock: nobody can go on"):
        launch(kernel, (torch.zeros(64), torch.zeros(1, dtype=torch.int64), 1, 0), 32, seconds=5)


def test_what_waits_for_other_processes_cannot_be_checked():
    with pytest.raises(LaunchError, match=r"cannot be checked.*KILN_CPU_KERNELS=host, or KILN_ALL"):
        World(processes=True, checked=True)
    with pytest.raises(ValueError, match="each process runs one"):
        World(2, processes=True)


# ---- the all-reduces -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "dtype", "calls"),
    [(2, torch.bfloat16, 2**32 - 3), (3, torch.float32, 0), (4, torch.float16, 2**32 - 3)],
)
def test_sums_have_the_bits_of_the_sum_in_the_order_of_ranks(ranks, world, dtype, calls):
    assert ranks.call(sums, [(dtype, 300, calls)] * world) == [[]] * world


def test_the_fused_kernel_has_the_bits_of_its_parts(ranks):
    assert ranks.call(fused, [(5, 192)] * 2) == [[True] * 40] * 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_skips_a_call_is_named_by_all_others_after_a_limit_of_real_time(ranks, algorithm):
    for rank, waited in enumerate(ranks.call(skip_a_call, [(algorithm, 1, 1000)] * 3)):
        if rank == 1:
            continue
        (late,) = waited.late
        assert (late.rank, late.missing, late.kernel, late.call) == (rank, 1, algorithm, 4)
        assert waited.real >= 1
        assert waited.cpu < waited.real / 2  # it slept
        assert waited.next_call < waited.real  # it did not wait again


def test_a_killed_rank_is_named_by_all_others():
    with Ranks(3) as processes:
        *late, gone = processes.try_call(die_in_the_middle, [("one_shot_push", 2, 1000)] * 3)
    assert isinstance(gone, RankFailed)
    assert [[(one.rank, one.missing, one.call) for one in ranks] for ranks in late] == [
        [(0, 2, 21)],
        [(1, 2, 21)],
    ]


def test_a_launch_of_one_rank_is_known_by_its_geometry():
    members = virtual_members(Layout(2, 1, 64, 64), "cpu", watchdog_ms=100)
    alone = replace(members, buffers=members.buffers[:1], record=members.record[:1])
    spec, x = BY_ALGORITHM["two_shot"], torch.ones(1, 8)
    for one, waits in ((members, False), (alone, True)):
        a = spec.arguments(
            spec.parameters.positional(
                {"out": x.expand(one.num_ranks, 8), "x": x.expand(one.num_ranks, 8)}
                | one.arguments()
            )
        )
        bound = spec.bind(a)
        geometry = spec.geometry(bound.variant, bound.sizes, host.HOST_GPU)
        assert geometry.one_gpu_of_several == waits
        assert geometry.cooperative != waits
    with pytest.raises(LaunchError, match="cannot be checked"):
        host.run(spec, a, checked=True, env=settings())


def test_a_launch_that_is_no_rank_of_a_group_waits_for_nobody():
    assert not LaunchGeometry((4, 1, 1), (32, 1, 1), cooperative=True).one_gpu_of_several
