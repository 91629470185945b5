"""Which part of a dimension of a weight belongs to which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from kiln.engine.errors import ConfigError


class Share(NamedTuple):
    """The ``size`` elements from ``start`` on, of ``whole``.

    A rank keeps them in ``room`` elements; what is behind them is zero.
    """

    start: int
    size: int
    whole: int
    room: int

    @property
    def place(self) -> slice:
        """The place of the share in the whole."""
        return slice(self.start, self.start + self.size)


def all_of(size: int) -> Share:
    """Return the share of a rank that keeps everything."""
    return Share(0, size, size, size)


def stacked(shares: Sequence[Share]) -> list[Share]:
    """Return shares of dimensions that are stored as one, behind each other.

    They are one share if the rank keeps everything.
    """
    whole = sum(share.whole for share in shares)
    if all(share == all_of(share.whole) for share in shares):
        return [all_of(whole)]
    starts = accumulate((share.whole for share in shares[:-1]), initial=0)
    return [
        Share(start + share.start, share.size, whole, share.room)
        for start, share in zip(starts, shares, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Split:
    """How one of ``world`` ranks divides a model. ``group`` names the group that sums up."""

    rank: int = 0
    world: int = 1
    group: str = ""

    def equal(self, size: int, name: str, what: str, *, multiple: int = 1) -> Share:
        """Return the rank's one of ``world`` equal parts, with room for a multiple of elements.

        Raises ConfigError, which says ``name`` and ``what``, if the size is not divisible.
        """
        if size % self.world:
            raise ConfigError(
                f"tensor_parallel_size={self.world}: {name} has {size} {what}, "
                f"not a multiple of {self.world}"
            )
        own = size // self.world
        return Share(self.rank * own, own, size, -(-own // multiple) * multiple)

    def kv_heads(self, num_kv_heads: int, head_dim: int, name: str) -> Share:
        """Return the rank's keys, or values; with more ranks than heads, ranks share a head.

        Raises ConfigError if neither number is a multiple of the other.
        """
        whole = num_kv_heads * head_dim
        if num_kv_heads >= self.world:
            if num_kv_heads % self.world == 0:
                return self.equal(whole, name, "outputs")
        elif self.world % num_kv_heads == 0:
            own = self.rank * num_kv_heads // self.world
            return Share(own * head_dim, head_dim, whole, head_dim)
        raise ConfigError(
            f"tensor_parallel_size={self.world}: {name} has {num_kv_heads} heads, and neither "
            "number is a multiple of the other"
        )

    def vocabulary(self, size: int) -> Share:
        """Return equal parts of any size, of which the last ranks' hold fewer elements."""
        room = -(-size // self.world)
        start = min(self.rank * room, size)
        return Share(start, min(start + room, size) - start, size, room)


WHOLE = Split()  # a model that one process has
