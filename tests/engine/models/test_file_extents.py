"""The bytes of a part of a tensor: those of its elements, in their order, and no others."""

from __future__ import annotations

import math
import os
import random

import pytest
import torch
from depth import at_depth

from kiln.engine.models.file_extents import Extent, extents_of, read_extent

OFFSET = 24


def draw(chance):
    """Return a shape, and the index of a part that is not empty."""
    shape = [chance.choice((1, 2, 3, 5, 8)) for _ in range(chance.randrange(5))]
    index = []
    for size in shape[: chance.randrange(len(shape) + 1)]:
        start = chance.randrange(size)
        index.append(chance.choice((slice(None), slice(start, chance.randint(start + 1, size)))))
    return shape, tuple(index)


@pytest.fixture
def file(tmp_path):
    """A file of the numbers from 0 on, of two bytes, behind ``OFFSET`` bytes."""
    numbers = torch.arange(5000, dtype=torch.int16)
    (tmp_path / "file").write_bytes(b"\xff" * OFFSET + numbers.numpy().tobytes())
    number = os.open(tmp_path / "file", os.O_RDONLY)
    yield number
    os.close(number)


def read(file, extents, most):
    found = bytearray()
    for extent in extents:
        for piece in extent.pieces(most):
            assert piece.num_bytes <= most
            out = bytearray(piece.num_bytes)
            read_extent(file, piece, memoryview(out))
            found += out
    return torch.frombuffer(found, dtype=torch.int16)


def test_parts_have_their_elements_and_in_their_order(file):
    chance = random.Random(0)
    for _ in range(at_depth(100, 5000)):
        shape, index = draw(chance)
        wanted = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)[index]
        extents = extents_of(OFFSET, 2, shape, index)
        found = read(file, extents, chance.choice((2, 6, 64, 4096)))
        assert torch.equal(found, wanted.flatten()), (shape, index)


@pytest.mark.parametrize(
    ("shape", "index", "count"),
    [
        ((4096, 14336), (slice(1024, 2048),), 1),  # outputs of a rank
        ((4096, 14336), (slice(None), slice(7168, 14336)), 1),  # inputs of a rank
        ((8, 64, 32), (slice(3, 4), slice(16, 32), slice(None)), 1),  # an expert's
        ((8, 64, 32), (slice(3, 4), slice(None), slice(16)), 1),
        ((32, 1, 64, 1), (slice(8, 16), slice(None), slice(8)), 1),  # ModelOpt's scales
        ((8, 64, 32), (slice(2, 4), slice(None), slice(16)), 2),
        ((), (), 1),
    ],
)
def test_shares_take_few_reads_of_no_other_bytes(shape, index, count):
    extents = extents_of(0, 2, shape, index)
    assert len(extents) == count
    part = torch.empty(shape, device="meta")[index].numel()
    assert sum(extent.num_bytes for extent in extents) == 2 * part


def test_many_rows_are_read_together(file, monkeypatch):
    calls, works = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *call: calls.append(call) or works(*call))
    rows = torch.arange(4800, dtype=torch.int16).view(1200, 4)
    found = read(file, extents_of(OFFSET, 2, (1200, 4), (slice(None), slice(1, 3))), 1 << 20)
    assert torch.equal(found.view(1200, 2), rows[:, 1:3])
    assert len(calls) == 3


@pytest.mark.parametrize("rows", [1, 7])
def test_a_system_that_returns_less_than_it_is_asked_for_is_asked_again(file, monkeypatch, rows):
    works, chance = os.preadv, random.Random(rows)

    def some(number, buffers, offset):
        want = sum(map(len, buffers))
        got = os.pread(number, chance.randint(1, want), offset)
        left = got
        for buffer in buffers:
            own, left = left[: len(buffer)], left[len(buffer) :]
            buffer[: len(own)] = own
        return len(got)

    extent = Extent(OFFSET, 8, rows, 10)
    whole, parts = bytearray(extent.num_bytes), bytearray(extent.num_bytes)
    read_extent(file, extent, memoryview(whole))
    for _ in range(20):
        monkeypatch.setattr(os, "preadv", some)
        read_extent(file, extent, memoryview(parts))
        monkeypatch.setattr(os, "preadv", works)
        assert parts == whole


@pytest.mark.parametrize("extent", [Extent(OFFSET, 10_001), Extent(OFFSET + 9990, 4, 3, 8)])
def test_a_file_that_ends_too_early_is_an_error(file, extent):
    with pytest.raises(OSError, match=r"the file ends \d bytes before"):
        read_extent(file, extent, memoryview(bytearray(extent.num_bytes)))
