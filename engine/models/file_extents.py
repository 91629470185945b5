"""Where the bytes of a part of a stored tensor are in its file, and how they are read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kiln.engine.models.weights import Index

_MOST_ROWS = 512  # of one system call, which takes 1,024 buffers: each row and the gap behind it


@dataclass(frozen=True, slots=True)
class Extent:
    """``rows`` runs of ``run`` bytes; the first is at ``offset``, the next ``pitch`` bytes on."""

    offset: int
    run: int
    rows: int = 1
    pitch: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all runs."""
        return self.rows * self.run

    def pieces(self, most: int) -> Iterator[Extent]:
        """Yield extents of at most ``most`` bytes, in their order."""
        if self.rows == 1 or self.run > most:
            for row in range(self.rows):
                first = self.offset + row * self.pitch
                for begin in range(0, self.run, most):
                    yield Extent(first + begin, min(most, self.run - begin))
            return
        step = min(_MOST_ROWS, most // self.run)
        for row in range(0, self.rows, step):
            rows = min(step, self.rows - row)
            yield replace(self, offset=self.offset + row * self.pitch, rows=rows)


def extents_of(offset: int, item: int, shape: Sequence[int], index: Index) -> list[Extent]:
    """Return where the part at ``index`` of a tensor is, in the order of its elements.

    ``offset``: of the tensor in its file; ``item``: the bytes of an element.
    """
    bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=False)]
    bounds += [(0, size) for size in shape[len(index) :]]
    dims = [(*b, size) for b, size in zip(bounds, shape, strict=True) if size != 1 or b != (0, 1)]
    run = item
    while dims and dims[-1][:2] == (0, dims[-1][2]):
        run *= dims.pop()[2]
    if not dims:
        return [Extent(offset, run)]
    strides = [run * math.prod(dim[2] for dim in dims[place:]) for place in range(1, len(dims) + 1)]
    offset += sum(dim[0] * stride for dim, stride in zip(dims, strides, strict=True))
    sizes = [stop - start for start, stop, _ in dims]
    run *= sizes.pop()
    rows = sizes.pop() if sizes else 1
    pitch = strides[-2] if len(strides) > 1 else 0
    return [
        Extent(offset + sum(map(math.prod, zip(place, strides, strict=False))), run, rows, pitch)
        for place in itertools.product(*map(range, sizes))
    ]


def read_extent(file: int, extent: Extent, out: memoryview) -> None:
    """Read an extent of an open file into the beginning of ``out``.

    What is between two runs goes to a small buffer that every gap shares. Raises OSError, also if
    the file ends before the extent does.
    """
    run, pitch = extent.run, extent.pitch
    gap = memoryview(bytearray(pitch - run if extent.rows > 1 else 0))
    row = 0
    while row < extent.rows:
        parts = []
        for one in range(row, min(extent.rows, row + _MOST_ROWS)):
            parts += [out[one * run : (one + 1) * run], gap]
        got = os.preadv(file, parts[:-1], extent.offset + row * pitch)
        complete = (got + len(gap)) // (run + len(gap))
        if not complete:
            _read_run(file, extent.offset + row * pitch, parts[0])
        row += complete or 1


def _read_run(file: int, offset: int, out: memoryview) -> None:
    """Read until ``out`` is full: a system call may return less."""
    done = 0
    while done < len(out):
        got = os.preadv(file, [out[done:]], offset + done)
        if not got:
            raise OSError(f"the file ends {len(out) - done} bytes before the tensor does")
        done += got
