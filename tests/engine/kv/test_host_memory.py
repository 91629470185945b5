"""Slots of host memory get the contents of blocks, and give them back, in each layout."""

from __future__ import annotations

import threading

import pytest
import torch

from kiln.engine.kv.host_memory import HostMemory, slot_bytes
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, windows=(None,) * 3)


def make(dtype=torch.float32, by_head=False, num_slots=4, launched=lambda: int, report=print):
    pool = KVPool(KVShape(SHAPE, dtype), 6, 4, torch.device("cpu"), by_head=by_head)
    return pool, HostMemory(pool, num_slots, launched=launched, report=report)


def contents(pool):
    """Return the bytes of each block: all layers' keys and values, and the tokens."""
    layers = [part for index in range(3) for part in pool.views(index)]
    keys = torch.stack(layers, 1).view(torch.uint8).flatten(1)
    return torch.cat([keys, pool.token_ids.view(6, 4).view(torch.uint8)], 1).clone()


def fill(pool):
    pool.planes.copy_(torch.randint(0, 256, pool.planes.shape, dtype=torch.uint8))
    pool.token_ids.copy_(torch.randint(0, 999, pool.token_ids.shape, dtype=torch.int32))


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_whole_and_alone(dtype, by_head):
    pool, memory = make(dtype, by_head)
    assert 6 * slot_bytes(pool) == contents(pool).numel()
    fill(pool)
    before = contents(pool)
    memory.store([5, 0, 2], [1, 3, 0])
    assert memory.ended(wait=True) == [None]
    fill(pool)
    between = contents(pool)
    memory.load([4, 1], [1, 0])
    assert memory.ended(wait=True) == [None]
    after = contents(pool)
    assert torch.equal(after[4], before[5])
    assert torch.equal(after[1], before[2])
    assert torch.equal(after[[0, 2, 3, 5]], between[[0, 2, 3, 5]])
    memory.close(wait=True)


def test_copies_wait_for_the_steps_launched_before_them_and_end_in_order():
    steps = threading.Event()
    pool, memory = make(launched=lambda: steps.wait)
    memory.store([0], [0])
    memory.load([1], [0])
    fill(pool)  # what a launched step writes
    assert memory.ended() == []
    steps.set()
    ended = memory.ended(wait=True)
    while len(ended) < 2:
        ended += memory.ended(wait=True)
    assert ended == [None, None]
    assert torch.equal(contents(pool)[0], contents(pool)[1])
    memory.close(wait=True)


def test_a_copy_that_raises_is_reported_and_the_next_one_runs():
    _, memory = make()
    memory.store([0], [99])
    memory.store([0], [0])
    ended = memory.ended(wait=True)
    ended += [] if len(ended) == 2 else memory.ended(wait=True)
    assert isinstance(ended[0], IndexError)
    assert ended[1] is None
    memory.store([0], [99])
    memory.drain()
    assert memory.ended(wait=True) == []
    memory.close(wait=True)


def test_the_memory_is_allocated_in_pieces(monkeypatch):
    heard = []
    monkeypatch.setattr("kiln.engine.kv.host_memory._PIECE_BYTES", 2 * slot_bytes(make()[0]))
    pool, memory = make(num_slots=5, report=lambda *done: heard.append(done))
    assert heard == [(0, 3), (1, 3), (2, 3), (3, 3)]
    fill(pool)
    before = contents(pool)
    memory.store([*range(5)], [*range(5)])
    memory.drain()
    fill(pool)
    memory.load([*range(5)], [*range(5)])
    memory.drain()
    assert torch.equal(contents(pool)[:5], before[:5])
    memory.close(wait=True)
