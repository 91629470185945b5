"""What ranks in processes of their own run in tests: small kernels on shared memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from rank_processes import Exchange

from kiln.engine.distributed.shared_memory import SharedMemory
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.template import Unit, include_closure
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import HostKernel, World

# In each round, a rank tells its predecessor some words, and waits for those of its successor, which
# may be up to `world` rounds ahead: there are places for eight.
RING = """
#include "kiln/ptx/clock.cuh"
#include "kiln/ptx/memory.cuh"
extern "C" __global__ void ring(uint8_t* own, const int64_t* peers, uint32_t* heard, int round,
                                int rank, int world, int watchdog_ms) {
  const int before = (rank + world - 1) % world;
  uint32_t* data = reinterpret_cast<uint32_t*>(own) + 32 + threadIdx.x;
  uint32_t* flag = reinterpret_cast<uint32_t*>(own) + threadIdx.x;
  const int64_t there = peers[before] / 4;
  data[there + round % 8 * 32] = round * 1000 + rank * 100 + threadIdx.x;
  kiln::store_release<kiln::Scope::sys>(flag + there, round);
  const uint64_t from = kiln::nanoseconds();
  while (int(kiln::load_acquire<kiln::Scope::sys>(flag) - uint32_t(round)) < 0)
    if (kiln::nanoseconds() - from > uint64_t(watchdog_ms) * 1000000) {
      heard[threadIdx.x] = 0;
      return;
    }
  heard[threadIdx.x] = data[round % 8 * 32];
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
    unit = Unit(f"{name}.cu", source, include_closure(source))
    return host.build(unit, name, c_types, name=name, checked=checked, env=settings())


def launch(kernel: HostKernel, values: tuple[Any, ...], threads: int, **world: Any) -> None:
    """Run a kernel in one block, beside other processes."""
    queue = World(processes=True, **world)
    queue.enqueue(0, kernel, LaunchGeometry((1, 1, 1), (threads, 1, 1)), values)
    queue.run()


def ring(rank: int, world: int, exchange: Exchange, rounds: int, skips: int, ms: int) -> Any:
    """Return what a rank heard in each round, and the seconds of the last one.

    Rank ``skips`` leaves out the last round.
    """
    memory = SharedMemory(2048, rank, exchange)
    kernel = build(RING, "ring", "pointer", "pointer", "pointer", *["int32"] * 4)
    heard, told, begin = torch.zeros(32, dtype=torch.int32), [], 0.0
    exchange(b"")  # all have built the kernel
    for number in range(1, rounds + 1):
        if number == rounds and rank == skips:
            break
        begin = time.monotonic()
        launch(kernel, (memory.own, memory.peers, heard, number, rank, world, ms), 32)
        told.append(heard.tolist())
    seconds = time.monotonic() - begin
    exchange(b"")
    memory.close()
    return told, seconds


def count(rank: int, world: int, exchange: Exchange, times: int) -> list[int]:
    """Return this rank's words, after 64 threads of every rank have counted in rank 0's."""
    memory = SharedMemory(1024, rank, exchange)
    kernel = build(COUNT, "count", "pointer", "pointer", "int32", "int32")
    exchange(b"")
    launch(kernel, (memory.own, memory.peers, times, rank), 64)
    exchange(b"")
    return memory.own.view(torch.int32)[:5].tolist()
