"""Find stop strings in streamed text, without emitting a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Emits text until a stop string is complete.

    Text that may still become a stop string is held back: the longest suffix that is a proper
    prefix of one. The match that ends first wins, and among those the longest, so the result does
    not depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.stops = tuple(stops)
        self.stopped_by: str | None = None
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> str:
        """Add text and return what can be emitted now.

        If ``armed`` is false, a stop string that ends in this text is ignored.
        """
        if not self.stops or not text:
            return text
        text, start = self._held + text, len(self._held)
        self._held = ""
        if armed and (stop := self._first(text, start)) is not None:
            end, self.stopped_by = stop
            return text[:end]
        keep = len(text) - self._longest_prefix(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return the text held back, because no more follows."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, start: int) -> tuple[int, str] | None:
        """Find the first stop string that ends after ``start``: where to cut, and which."""
        found = []
        for stop in self.stops:
            position = text.find(stop, max(0, start - len(stop) + 1))
            if position >= 0:
                found.append((position + len(stop), position, stop))
        if not found:
            return None
        end, begin, stop = min(found)
        return (end if self._include_stop else begin), stop

    def _longest_prefix(self, text: str) -> int:
        """Return the length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
