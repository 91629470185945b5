"""What a rank writes down when it has waited too long for another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS

FUSED = "fused_all_reduce_add_rms_norm"
KERNELS = (*ALGORITHMS, FUSED)  # a record names one of these by its place, counting from 1
RECORD_WORDS = 16  # int32; group.cuh writes them
POISONED = 10  # the word in which a call that did nothing, after a rank was late, tells who was
STOP = 11  # the word that the host sets to end all waits; those who wait then are late


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that another one has waited for until its time limit.

    ``rank`` waited for ``missing``, in a ``kernel`` on a message of ``num_bytes``. ``call`` counts
    the calls of the group from 1; ``epoch`` those of the same kind, push or pull, from 0, both
    modulo 2^32. ``block``: the thread block that waited. ``waited_ms``: milliseconds.
    """

    rank: int
    missing: int
    kernel: str
    num_bytes: int
    call: int
    epoch: int
    block: int
    waited_ms: int
    world: int

    def __str__(self) -> str:
        """Return a sentence for an error message."""
        return (
            f"rank {self.rank} of {self.world} waited {self.waited_ms / 1000:.1f} s for rank "
            f"{self.missing} ({self.kernel}, {self.num_bytes} bytes, call {self.call})"
        )


def late_ranks(record: torch.Tensor) -> list[LateRank]:
    """Return what the ranks of a record [ranks, RECORD_WORDS] int32 have written down.

    Reading it waits for the device if it is there, not in pinned memory.
    """
    rows = [[word % 2**32 for word in row] for row in record.tolist()]
    return [_late_rank(row) for row in rows if row[0]]


def poisoned_by(word: int) -> tuple[int, int]:
    """Return the rank that waited, and the one that it waited for, of a word POISONED that is set.

    word: 1, and in bits 8 and 16 on the two ranks.
    """
    return word >> 8 & 0xFF, word >> 16 & 0xFF


def _late_rank(row: list[int]) -> LateRank:
    kernel, rank, missing, world, low, high, call, epoch, block, waited_ms = row[:10]
    return LateRank(
        rank, missing, KERNELS[kernel - 1], low + (high << 32), call, epoch, block, waited_ms, world
    )
