"""The byte layout of one rank's communication buffer. The kernels get these offsets as arguments.

    header    128 bytes                    word 0: poisoned; word 1: claimed (record.py)
    counters  8 bytes for each block       push calls so far, pull calls so far; read by this rank
    flags     128 bytes for each block     a word for each rank: the barrier it has reached
    push      2 phases x world slots       filled with 0xff; slot s holds what rank s has sent
    pull      2 phases                     inputs or partial sums that peers read

A call uses the phase of its counter's lowest bit, so consecutive calls of a kind alternate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Algorithm = Literal["one_shot_push", "two_shot_push", "one_shot_pull", "two_shot"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
MIN_WORLD, MAX_WORLD = 2, 8
MAX_WORLDS = (2, 4, 8)  # the kernels' compile-time limits of the world size
VECTOR = 16  # bytes of one access
PUSHES: tuple[Algorithm, ...] = ("one_shot_push", "two_shot_push")
TWO_SHOTS: tuple[Algorithm, ...] = ("two_shot_push", "two_shot")

_HEADER = _LINE = 128
_COUNTERS = 8  # bytes of a block's counters
_PHASES = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is in a rank's buffer; the same for all ranks of a group. Units: bytes.

    ``world``: ranks; ``max_blocks``: thread blocks of every call; ``push_bytes``, ``pull_bytes``:
    the largest message of the algorithms that push, and of the others. Raises ValueError.
    """

    world: int
    max_blocks: int
    push_bytes: int
    pull_bytes: int

    def __post_init__(self) -> None:
        if not MIN_WORLD <= self.world <= MAX_WORLD:
            raise ValueError(
                f"an all-reduce of {self.world} ranks: want {MIN_WORLD} to {MAX_WORLD}"
            )
        for name in ("max_blocks", "push_bytes", "pull_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"Layout: {name} is {getattr(self, name)}, want at least 1")

    @property
    def max_world(self) -> int:
        """The smallest compile-time limit that holds the world."""
        return next(most for most in MAX_WORLDS if most >= self.world)

    @property
    def counters_at(self) -> int:
        """Offset of the counters."""
        return _HEADER

    @property
    def flags_at(self) -> int:
        """Offset of the flags, a multiple of 128."""
        return _HEADER + -(-_COUNTERS * self.max_blocks // _LINE) * _LINE

    @property
    def push_at(self) -> int:
        """Offset of the push slots: [phase, source rank, slot_bytes]."""
        return self.flags_at + _LINE * self.max_blocks

    @property
    def slot_bytes(self) -> int:
        """Size of a push slot: a whole message, or two shards of it."""
        return VECTOR * max(vectors(self.push_bytes), 2 * self._shard(self.push_bytes))

    @property
    def pull_at(self) -> int:
        """Offset of the pull areas: [phase, area_bytes]."""
        return self.push_at + _PHASES * self.world * self.slot_bytes

    @property
    def area_bytes(self) -> int:
        """Size of a pull area: a whole message, or a shard of each rank and their sum."""
        shards = (self.world + 1) * self._shard(self.pull_bytes)
        return VECTOR * max(vectors(self.pull_bytes), shards)

    @property
    def num_bytes(self) -> int:
        """Size of the whole buffer, a multiple of 128."""
        return -(-(self.pull_at + _PHASES * self.area_bytes) // _LINE) * _LINE

    def limit(self, algorithm: str) -> int:
        """Return the largest message of an algorithm, or of the fused kernel, which pushes."""
        pulls = algorithm in ALGORITHMS and algorithm not in PUSHES
        return self.pull_bytes if pulls else self.push_bytes

    def _shard(self, num_bytes: int) -> int:
        return -(-vectors(num_bytes) // self.world)

    def clear(self, buffers: torch.Tensor, calls: int = 0) -> None:
        """Prepare buffers [ranks, num_bytes] uint8 for a group's first call.

        Every rank must have done this before any rank makes a call. ``calls``: what the counters
        begin with, below 2^32; they wrap around.
        """
        buffers[:, : self.push_at] = 0
        buffers[:, self.push_at : self.pull_at] = 0xFF
        if calls:
            words = buffers[:, : self.push_at].contiguous().view(torch.int32)
            words[:, self.counters_at // 4 : self.flags_at // 4] = _signed(calls)
            words[:, self.flags_at // 4 :] = _signed(2 * calls)  # two barriers in a call
            buffers[:, : self.push_at] = words.view(torch.uint8)


def vectors(num_bytes: int) -> int:
    """Return the number of 16-byte vectors that hold a message."""
    return -(-num_bytes // VECTOR)


def _signed(word: int) -> int:
    return ((word + 2**31) % 2**32) - 2**31
