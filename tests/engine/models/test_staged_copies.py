"""Tensors that threads read into buffers, which a device copies late, arrive as they are stored."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
from depth import at_depth
from late_copier import LateCopier

from kiln.engine.models import staged_copies
from kiln.engine.models.file_extents import extents_of
from kiln.engine.models.staged_copies import StagedCopies


@pytest.fixture
def file(tmp_path):
    numbers = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
    path = tmp_path / "file"
    path.write_bytes(numbers.numpy().tobytes())
    number = os.open(path, os.O_RDONLY)
    yield number, numbers, path
    os.close(number)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors are read by threads too."""
    monkeypatch.setattr(staged_copies, "_LEAST", 64)


def copies(copier, threads=3, size=256, buffers=4):
    return StagedCopies(copier, threads, size, buffers)


def test_tensors_arrive_whole_through_few_small_buffers(file):
    number, numbers, _ = file
    for seed in range(at_depth(2, 50)):
        chance, copier = random.Random(seed), LateCopier(seed)
        staged, told = copies(copier), []
        for _ in range(30):
            rows, columns = chance.randint(1, 40), chance.randint(1, 90)
            offset = 2 * chance.randrange(1000)
            index = chance.choice(
                ((), (slice(rows // 2, None),), (slice(None), slice(columns // 2 + 1)))
            )
            stored = numbers[offset:][: 2 * rows * columns].view(torch.int16).view(rows, columns)
            dtype = chance.choice((torch.int16, torch.int32, torch.float32))
            out = torch.full(stored[index].shape, 7, dtype=dtype)
            if chance.random() < 0.3:  # room behind each row
                out = torch.full((out.shape[0], out.shape[1] + 2), 7, dtype=dtype)[:, :-2]
            staged.copy(out, torch.int16, number, extents_of(offset, 2, (rows, columns), index))
            told.append((out, stored[index]))
        staged.close()
        copier.synchronize()
        assert all(torch.equal(out, want.to(out.dtype)) for out, want in told)
        assert copier.buffers == 4


def test_small_tensors_need_no_thread_and_no_more_than_a_buffer(file, monkeypatch):
    number, numbers, _ = file
    copier = LateCopier()
    staged = copies(copier)
    monkeypatch.setattr(staged, "_threads", None)
    out = torch.empty(60, dtype=torch.uint8)
    staged.copy(out, torch.uint8, number, extents_of(8, 1, (60,), ()))
    copier.synchronize()
    assert torch.equal(out, numbers[8:68])
    assert copier.buffers == 1


def test_several_threads_read_a_tensor(file, monkeypatch):
    """Each of three readers waits for the other two."""
    number, numbers, _ = file
    meet, works = threading.Barrier(3), staged_copies.read_extent

    def read(*call):
        meet.wait(timeout=60)
        works(*call)

    monkeypatch.setattr(staged_copies, "read_extent", read)
    out = torch.empty(600, dtype=torch.uint8)
    staged = copies(LateCopier())
    staged.copy(out, torch.uint8, number, extents_of(0, 1, (600,), ()))
    staged.close()
    assert torch.equal(out, numbers[:600])


def test_an_error_of_a_thread_is_raised_and_leaves_buffers_for_the_next_tensor(file):
    number, numbers, path = file
    copier = LateCopier()
    staged = copies(copier)
    os.truncate(path, 5000)
    for begin in (4500, 4990):  # by threads, and without
        for _ in range(3):
            size = 3000 if begin == 4500 else 60
            with pytest.raises(OSError, match="the file ends"):
                staged.copy(
                    torch.empty(size), torch.uint8, number, extents_of(begin, 1, (size,), ())
                )
    out = torch.empty(4000, dtype=torch.uint8)
    staged.copy(out, torch.uint8, number, extents_of(0, 1, (4000,), ()))
    staged.close()
    copier.synchronize()
    assert torch.equal(out, numbers[:4000])
    assert copier.buffers <= 4


def test_each_byte_behind_what_was_read_is_announced_once(file, monkeypatch):
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: advised.append(call[1:3]))
    monkeypatch.setattr(staged_copies, "_READ_AHEAD", 100)
    staged = copies(LateCopier())
    for end in (10, 30, 61, 130, 1000, 500, 540, 560):
        staged.read_ahead(file[0], end)
    staged.close()
    ranges = [(begin, begin + size) for begin, size in advised]
    assert ranges == [
        (10, 110), (110, 161), (161, 230), (1000, 1100), (500, 600), (600, 660)
    ]  # fmt: skip
