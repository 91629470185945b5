"""What ranks in processes of their own run in tests: kernels on shared memory."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from rank_processes import Exchange

from kiln.engine.distributed.shared_memory import SharedMemory
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import SCALARS, LaunchGeometry
from kiln.jit_kernels.ops.all_reduce.functions import (
    all_reduce,
    fused_all_reduce_add_rms_norm,
)
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, Algorithm, Layout
from kiln.jit_kernels.ops.all_reduce.members import Members
from kiln.jit_kernels.ops.all_reduce.record import RECORD_WORDS, LateRank, late_ranks
from kiln.jit_kernels.ops.all_reduce.reference import sum_ranks
from kiln.jit_kernels.ops.all_reduce.spec import BY_ALGORITHM
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import HostKernel, World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

T = TypeVar("T")
RING_TYPES = ("pointer", "pointer", "pointer", "int32", "int32", "int32")
COUNT_TYPES = ("pointer", "pointer", "int32", "int32")

# In each round, a rank tells its predecessor some words, and waits for those of its successor. That
# may be up to `world` rounds ahead: there are places for eight.
RING = """
#include "kiln/ptx/memory.cuh"
extern "C" __global__ void ring(uint8_t* own, const int64_t* peers, uint32_t* heard, int round,
                                int rank, int world) {
  const int before = (rank + world - 1) % world, place = 32 + round % 8 * 32;
  const int64_t there = peers[before] / 4;
  uint32_t* flag = reinterpret_cast<uint32_t*>(own) + threadIdx.x;
  flag[there + place] = round * 1000 + rank * 100 + threadIdx.x;
  kiln::store_release<kiln::Scope::sys>(flag + there, round);
  while (int(kiln::load_acquire<kiln::Scope::sys>(flag) - uint32_t(round)) < 0) {}
  heard[threadIdx.x] = flag[place];
}
"""

# Every thread of every rank counts in words of rank 0, by all kinds of atomics.
COUNT = """
#include "kiln/ptx/memory.cuh"
extern "C" __global__ void count(uint8_t* own, const int64_t* peers, int times, int rank) {
  uint32_t* words = reinterpret_cast<uint32_t*>(own + peers[0]);
  for (int i = 0; i < times; i++) {
    kiln::add_acq_rel<kiln::Scope::sys>(words, 1);
    kiln::arrive<kiln::Scope::sys>(words + 1, 6);
    atomicAdd_system(reinterpret_cast<float*>(words + 2), 1.0f);
    atomicMax_system(words + 3, uint32_t(rank * 1000 + i));
    while (true) {
      const uint32_t old = kiln::load_relaxed<kiln::Scope::sys>(words + 4);
      if (atomicCAS_system(words + 4, old, old + 3) == old) break;
    }
  }
}
"""


def build(source: str, name: str, *c_types: str, checked: bool = False) -> HostKernel:
    """Return a kernel of this file."""
    source = f'#line 1 "{name}.cu"\n{source}'
    unit = Unit(f"{name}.cu", source, include_closure(source))
    return host.build(unit, name, c_types, name=name, checked=checked, env=settings())


def in_turn(rank: int, exchange: Exchange, make: Callable[[], T]) -> T:
    """Return what ``make`` returns: rank 0 compiles, and the others find the programs on disk."""
    if rank == 0:
        made = make()
    exchange(b"")
    if rank != 0:
        made = make()
    exchange(b"")
    return made


def launch(
    kernel: HostKernel, values: tuple[Any, ...], threads: int, blocks: int = 1, **world: Any
) -> None:
    """Run a kernel beside other processes."""
    queue = World(processes=True, **world)
    queue.enqueue(0, kernel, LaunchGeometry((blocks, 1, 1), (threads, 1, 1)), values)
    queue.run()


def ring(rank: int, world: int, exchange: Exchange, rounds: int) -> list[list[int]]:
    """Return what this rank's threads have heard in each round."""
    memory = SharedMemory(2048, rank, exchange)
    kernel = in_turn(rank, exchange, lambda: build(RING, "ring", *RING_TYPES))
    heard, told = torch.zeros(32, dtype=torch.int32), []
    for number in range(1, rounds + 1):
        launch(kernel, (memory.own, memory.peers, heard, number, rank, world), 32)
        told.append(heard.tolist())
    exchange(b"")
    memory.close()
    return told


def count(rank: int, world: int, exchange: Exchange, times: int) -> list[int]:
    """Return this rank's words, after 64 threads of every rank have counted in rank 0's."""
    memory = SharedMemory(1024, rank, exchange)
    kernel = in_turn(rank, exchange, lambda: build(COUNT, "count", *COUNT_TYPES))
    launch(kernel, (memory.own, memory.peers, times, rank), 64)
    exchange(b"")
    return memory.own.view(torch.int32)[:5].tolist()


class Group:
    """A group of Kiln's all-reduces whose ranks are processes."""

    def __init__(
        self, rank: int, world: int, exchange: Exchange, *, max_bytes: int, blocks: int = 1,
        watchdog_ms: int = 20_000, calls: int = 0,
    ) -> None:  # fmt: skip
        layout = Layout(world, blocks, max_bytes, max_bytes)
        self.memory = SharedMemory(layout.num_bytes, rank, exchange)
        buffers = self.memory.own.unsqueeze(0)
        layout.clear(buffers, calls)
        self.record = torch.zeros(1, RECORD_WORDS, dtype=torch.int32)
        self.members = Members(
            layout, buffers, self.memory.peers, self.record, rank, watchdog_ms=watchdog_ms
        )
        exchange(b"")  # all have cleared their buffers

    def build(self, rank: int, exchange: Exchange, dtype: torch.dtype) -> None:
        """Build the kernels of a dtype on all ranks."""
        variant = {"scalar_t": SCALARS[dtype], "max_world": str(self.members.layout.max_world)}
        work = [(BY_ALGORITHM[algorithm], variant) for algorithm in ALGORITHMS]
        in_turn(rank, exchange, lambda: host.prepare(work, checked=False, env=settings()))

    def all_reduce(self, x: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
        """Return the sum of x over the ranks."""
        return all_reduce(x.unsqueeze(0), self.members, algorithm)[0]


def sums(
    rank: int, world: int, exchange: Exchange, dtype: torch.dtype, rounds: int, calls: int
) -> list[str]:
    """Sum messages of random sizes by random algorithms; return the rounds with wrong bits."""
    most = 3000
    group = Group(rank, world, exchange, max_bytes=4 * most, blocks=2, calls=calls)
    group.build(rank, exchange, dtype)
    same, wrong = random.Random(world), []  # the same choices on every rank
    for number in range(rounds):
        algorithm = same.choice(ALGORITHMS)
        n, start = same.choice([1, 7, 64, same.randrange(most)]), same.randrange(3)
        numbers = torch.Generator().manual_seed(same.randrange(2**31))
        x = torch.randn(world, start + n, generator=numbers).to(dtype)[:, start:]
        out = group.all_reduce(x[rank], algorithm)
        if not torch.equal(out, sum_ranks(x)):
            wrong.append(f"round {number}: {algorithm}, {n} elements")
    exchange(b"")  # all have read their peers' buffers
    return wrong + [str(late) for late in late_ranks(group.record)]


def fused(rank: int, world: int, exchange: Exchange, rows: int, d: int) -> list[bool]:
    """Return whether the fused kernel has the bits of its two parts, in each of some calls."""
    group = Group(rank, world, exchange, max_bytes=2 * rows * d, blocks=2)
    own = torch.Generator().manual_seed(rank)
    weight, equal = torch.linspace(0.5, 2, d).bfloat16(), []
    for _ in range(20):
        x = torch.randn(1, rows, d, generator=own).bfloat16()
        residual = torch.ones(1, rows, d).bfloat16()
        apart, apart_residual = group.all_reduce(x[0], "two_shot"), residual[0].clone()
        fused_add_rms_norm(apart, apart_residual, weight, 1e-5)
        out = fused_all_reduce_add_rms_norm(x, residual, weight, 1e-5, group.members)
        equal += [torch.equal(out[0], apart), torch.equal(residual[0], apart_residual)]
    exchange(b"")  # all have read their peers' buffers
    return equal


@dataclass(frozen=True)
class Waited:
    """What a rank that waited in vain has seen. Units: seconds."""

    late: list[LateRank]
    real: float
    cpu: float
    next_call: float  # real time of the call after


def skip_a_call(
    rank: int, world: int, exchange: Exchange, algorithm: Algorithm, missing: int, ms: int
) -> Waited | None:
    """Make three calls, and a fourth without rank ``missing``, which is gone by then."""
    group = Group(rank, world, exchange, max_bytes=4096, watchdog_ms=ms)
    group.build(rank, exchange, torch.bfloat16)
    x = torch.ones(500).bfloat16()
    for _ in range(3):
        assert group.all_reduce(x, algorithm).eq(world).all()
    exchange(b"")  # so the others begin to wait at about the same time
    if rank == missing:
        return None
    real, cpu = time.monotonic(), time.process_time()
    group.all_reduce(x, algorithm)
    real, cpu = time.monotonic() - real, time.process_time() - cpu
    begin = time.monotonic()
    group.all_reduce(x, algorithm)
    return Waited(late_ranks(group.record), real, cpu, time.monotonic() - begin)


def die_in_the_middle(
    rank: int, world: int, exchange: Exchange, algorithm: Algorithm, victim: int, ms: int
) -> list[LateRank]:
    """Call until the watchdog ends a wait, as rank ``victim`` is killed after some calls."""
    group = Group(rank, world, exchange, max_bytes=4096, watchdog_ms=ms)
    group.build(rank, exchange, torch.bfloat16)
    x = torch.ones(500).bfloat16()
    for number in range(1000):
        if number == 20:
            exchange(b"")
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(x, algorithm)
        if late := late_ranks(group.record):
            return late
    return []
