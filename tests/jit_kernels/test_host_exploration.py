"""Scheduler seeds explore: many find a fault that needs one rank far ahead of another."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

# A barrier between ranks: each stores its epoch for its peers and waits for theirs. A rank that
# waits for exactly its own epoch misses it if a peer has already stored the next one.
MEET = """
#include "kiln/ptx/memory.cuh"
using namespace kiln;
extern "C" __global__ void k(uint32_t* flags, int rank, int ranks, int epoch) {
  const int peer = threadIdx.x;
  if (peer >= ranks) return;
  store_release<Scope::sys>(flags + peer * ranks + rank, epoch);
  while (int(load_acquire<Scope::sys>(flags + rank * ranks + peer)) TEST epoch);
}
"""
SEEDS = range(1, 41)


def hangs(test, ranks, seed):
    text = MEET.replace("TEST", test)
    unit = Unit("test.cu", text, include_closure(text))
    kinds = ["pointer", "int32", "int32", "int32"]
    kernel = host.build(unit, "k", kinds, name="k", checked=False, env=settings())
    flags, world = torch.zeros(ranks, ranks, dtype=torch.int32), World(ranks, seed=seed)
    for epoch in range(1, 5):
        for rank in range(ranks):
            values = (flags, rank, ranks, epoch)
            world.enqueue(rank, kernel, LaunchGeometry((1, 1, 1), (32, 1, 1)), values)
    try:
        world.run()
    except HostFault as fault:
        return "deadlock" in str(fault)
    return False


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_an_epoch_ahead_is_found_by_a_quarter_of_the_seeds(ranks):
    assert sum(hangs("!=", ranks, seed) for seed in SEEDS) >= len(SEEDS) / 4
    assert not any(hangs("<", ranks, seed) for seed in SEEDS)
