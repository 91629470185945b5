"""Copies by the driver: each run of a block has its own place in the slot, on both ways."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from kiln.engine.kv import device_copies
from kiln.engine.kv.device_copies import DeviceCopies
from kiln.engine.kv.host_memory import HostMemory, slot_bytes
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape


def driver_that_copies(calls):
    """``cuMemcpyBatchAsync`` of CUDA 12.8, on host memory."""

    def copy(to, source, sizes, count, attributes, first, num_attributes, failed, stream):
        read = [
            (ctypes.c_uint64 * count.value).from_address(one.value) for one in (to, source, sizes)
        ]
        for place, other, size in zip(*read, strict=True):
            ctypes.memmove(place, other, size)
        calls.append((count.value, num_attributes.value, stream.value))
        return 0

    return copy


@pytest.fixture
def no_device(monkeypatch):
    """Stand-ins for what needs a GPU: streams and events."""
    stream = SimpleNamespace(device="cuda:0", cuda_stream=77)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def make_pool(by_head):
    shape = KVShape(AttentionShape(4, 2, 8, (None,) * 3), torch.bfloat16)
    pool = KVPool(shape, 70, 4, torch.device("cpu"), by_head=by_head)
    pool.planes.copy_(torch.randint(0, 256, pool.planes.shape, dtype=torch.uint8))
    pool.token_ids.copy_(torch.arange(len(pool.token_ids)))
    return pool


@pytest.mark.parametrize("by_head", [False, True])
def test_the_driver_copies_what_a_copy_on_the_cpu_would(monkeypatch, no_device, by_head):
    calls = []
    monkeypatch.setattr(device_copies, "_batched_copy", lambda: driver_that_copies(calls))
    pool = make_pool(by_head)
    monkeypatch.setattr(device_copies, "_CALL_BYTES", 33 * slot_bytes(pool) - 1)
    blocks, slots = [*range(69, 20, -1)], [*range(49)]
    found = torch.zeros(60, slot_bytes(pool), dtype=torch.uint8)
    copy = DeviceCopies(pool, list(found))
    copy(blocks, slots, to_host=True)
    memory = HostMemory(pool, 60, launched=lambda: int, report=lambda *done: None)
    memory.store(blocks, slots)
    memory.drain()
    wanted = torch.stack(memory._copy._slots)
    assert torch.equal(found, wanted)
    runs = len(pool.planes) + 1
    assert calls == [(32 * runs, 1, 77), (17 * runs, 1, 77)]
    before = pool.planes.clone(), pool.token_ids.clone()
    pool.planes.zero_()
    pool.token_ids.zero_()
    copy(blocks, slots, to_host=False)
    assert torch.equal(pool.planes[:, 21:], before[0][:, 21:])
    assert torch.equal(pool.token_ids[84:], before[1][84:])
    assert not pool.planes[:, :21].any()
    memory.close(wait=True)


def test_an_error_of_the_driver_is_raised(monkeypatch, no_device):
    monkeypatch.setattr(device_copies, "_batched_copy", lambda: lambda *arguments: 1)
    pool = make_pool(by_head=True)
    copy = DeviceCopies(pool, [torch.zeros(slot_bytes(pool), dtype=torch.uint8)])
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed: error 1"):
        copy([1], [0], to_host=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("by_head", [False, True])
def test_blocks_come_back_from_page_locked_memory(monkeypatch, by_head, batched):
    if not batched:
        monkeypatch.setattr(device_copies, "_batched_copy", lambda: None)
    shape = KVShape(AttentionShape(4, 2, 64, (None,) * 3), torch.bfloat16)
    pool = KVPool(shape, 70, 16, torch.device("cuda"), by_head=by_head)
    pool.planes.random_(0, 256)
    pool.token_ids.random_(0, 999)
    before = pool.planes.clone(), pool.token_ids.clone()
    event = torch.cuda.Event()
    event.record()
    memory = HostMemory(pool, 64, launched=lambda: event.synchronize, report=lambda *done: None)
    memory.store([*range(40)], [*range(63, 23, -1)])
    memory.load([*range(69, 29, -1)], [*range(24, 64)])
    while memory._copies:
        assert not any(memory.ended(wait=True))
    assert torch.equal(pool.planes[:, 30:], before[0][:, :40])
    assert torch.equal(pool.token_ids[30 * 16 :], before[1][: 40 * 16])
    assert torch.equal(pool.planes[:, :30], before[0][:, :30])
    memory.close(wait=True)
