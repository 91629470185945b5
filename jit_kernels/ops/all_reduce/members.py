"""The ranks of a group as the kernels see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kiln.jit_kernels.ops.all_reduce.layout import VECTOR, Layout
from kiln.jit_kernels.ops.all_reduce.record import RECORD_WORDS

WATCHDOG_MS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The ranks that one launch runs, and where it finds all ranks of the group.

    ``buffers`` [ranks, layout.num_bytes] uint8: those of ranks first_rank, first_rank + 1, ... A
    rank of a real group passes its own buffer, [1, num_bytes]; virtual ranks of one GPU pass all.
    ``peers`` [world] int64, on the same device: the distance in bytes from ``buffers`` to each
    rank's buffer, which may be memory of another GPU that this one can access. ``record``
    [ranks, RECORD_WORDS] int32 of zeros, on the device or in pinned memory: see ``late_ranks``.
    ``watchdog_ms``: how long a rank waits for another, in milliseconds. Raises ValueError.
    """

    layout: Layout
    buffers: torch.Tensor
    peers: torch.Tensor
    record: torch.Tensor
    first_rank: int
    watchdog_ms: int = WATCHDOG_MS

    def __post_init__(self) -> None:
        layout, ranks = self.layout, len(self.buffers)
        _check("buffers", self.buffers, (ranks, layout.num_bytes), torch.uint8)
        _check("peers", self.peers, (layout.world,), torch.int64)
        _check("record", self.record, (ranks, RECORD_WORDS), torch.int32)
        if not 0 <= self.first_rank <= layout.world - ranks:
            raise ValueError(
                f"Members: ranks {self.first_rank} to {self.first_rank + ranks - 1} of a group of "
                f"{layout.world}"
            )
        if self.buffers.data_ptr() % VECTOR:
            raise ValueError(f"Members: buffers must start at a multiple of {VECTOR} bytes")
        if self.watchdog_ms < 1:
            raise ValueError(f"Members: watchdog_ms is {self.watchdog_ms}, want at least 1")

    @property
    def num_ranks(self) -> int:
        """The ranks that one launch runs."""
        return len(self.buffers)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the operators that tell about the group, by name."""
        layout = self.layout
        return {
            "buffers": self.buffers, "peers": self.peers, "record": self.record,
            "first_rank": self.first_rank, "max_blocks": layout.max_blocks,
            "push_bytes": layout.push_bytes, "pull_bytes": layout.pull_bytes,
            "limit_ms": self.watchdog_ms,
        }  # fmt: skip


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(
            f"Members: {name} is {list(x.shape)} of {x.dtype} with strides {x.stride()}, want "
            f"contiguous {list(shape)} of {dtype}"
        )


def virtual_members(
    layout: Layout, device: torch.device | str, *, watchdog_ms: int = WATCHDOG_MS, calls: int = 0
) -> Members:
    """Return a group whose ranks are all on one device, ready for its first call.

    ``calls``: what the counters begin with, for tests.
    """
    buffers = torch.empty(layout.world, layout.num_bytes, dtype=torch.uint8, device=device)
    layout.clear(buffers, calls)
    peers = torch.arange(layout.world, device=device) * layout.num_bytes
    record = torch.zeros(layout.world, RECORD_WORDS, dtype=torch.int32, device=device)
    return Members(layout, buffers, peers, record, first_rank=0, watchdog_ms=watchdog_ms)
