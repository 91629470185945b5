"""The batch sizes for which a graph is captured. A batch runs in the smallest that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_WASTE = 0.125  # most of a bucket's rows that are padding, if a batch is not smaller than one


def decode_buckets(most: int) -> tuple[int, ...]:
    """Return sizes from 1 to ``most`` rows, at most an eighth of each being padding.

    Each bucket is the largest that wastes no more for a batch of one row more than the bucket
    before. Up to 256 rows that gives 29 buckets.
    """
    sizes = [0]
    while sizes[-1] < most:
        largest = int((sizes[-1] + 1) / (1 - MAX_WASTE) + 1e-9)
        sizes.append(min(largest, most))
    return tuple(sizes[1:])


def bucket_for(buckets: Sequence[int], rows: int) -> int | None:
    """Return the smallest of ascending buckets that has room for ``rows``; None if none has."""
    index = bisect_left(buckets, rows)
    return buckets[index] if index < len(buckets) else None
