"""First-fit search in a range of memory of which some spans are taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """``size`` elements from ``start`` on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first element behind it."""
        return self.start + self.size

    def overlaps(self, other: Span) -> bool:
        """Whether the two share an element."""
        return self.start < other.end and other.start < self.end


def gaps(taken: Iterable[Span], size: int) -> Iterator[Span]:
    """Yield the free spans of a range of ``size`` elements, lowest first."""
    end = 0
    for span in sorted(taken):
        if span.start > end:
            yield Span(end, span.start - end)
        end = span.end
    if size > end:
        yield Span(end, size - end)


def first_fit(taken: Iterable[Span], size: int, wanted: int) -> int | None:
    """Return the lowest start of ``wanted`` free elements; None if no gap is so large."""
    return next((gap.start for gap in gaps(taken, size) if gap.size >= wanted), None)


def largest_gap(taken: Iterable[Span], size: int) -> int:
    """Return the size of the largest free span."""
    return max((gap.size for gap in gaps(taken, size)), default=0)
