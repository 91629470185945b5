"""Text that arrives in pieces, for parsers that are written as if they could wait for more.

A parser is a generator: it yields where it needs more text. What it reads is a stream of
characters without borders, so its result cannot depend on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # yields None when it needs more text

_SPACE = re.compile(r"\s*")


class TextSource:
    """The text that was pushed and not yet read.

    Every method that returns ``Steps`` waits for the text it needs. None keeps more than a mark of
    unread text once it has what it needs, so the cost of a stream is linear in its length.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what is before it was read
        self._ended = False
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        """Add text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Say that no more text follows."""
        self._ended = True

    @property
    def at_end(self) -> bool:
        """Whether all text was read that there is so far."""
        return self._at == len(self._text)

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def read(self, count: int) -> str:
        """Read characters that are there already, and return them."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._record is not None:
            self._record.append(taken)
        return taken

    def record(self) -> None:
        """Keep what is read from now on, in case that it turns out to be no call."""
        self._record = []

    def recorded(self) -> str:
        """Stop recording and return what was read meanwhile; "" if nothing was recorded."""
        kept, self._record = "".join(self._record or ()), None
        return kept

    def next_of(self, *marks: str) -> Steps[str]:
        """Return the longest mark that comes next, without reading it; "" if none does."""
        while True:
            found = [mark for mark in marks if self._text.startswith(mark, self._at)]
            if self._ended or not any(self._may_become(mark, self._at) for mark in marks):
                return max(found, key=len, default="")
            yield

    def may_begin(self, *marks: str) -> Steps[bool]:
        """Whether one of the marks comes next, or the text ends before this is known."""
        if (yield from self.next_of(*marks)):
            return True
        return any(self._may_become(mark, self._at) for mark in marks)

    def read_mark(self, *marks: str) -> Steps[str]:
        """Read the mark that comes next and return it; "" if none of them does."""
        mark = yield from self.next_of(*marks)
        return self.read(len(mark))

    def read_end(self, mark: str, emit: Callable[[str], None]) -> Steps[bool]:
        """Read white space and a mark. Without the mark the white space goes to ``emit``."""
        space = yield from self.read_space()
        found = bool((yield from self.read_mark(mark)))
        if not found and space:
            emit(space)
        return found

    def read_rest(self, emit: Callable[[str], None]) -> Steps[None]:
        """Read all text up to the end."""
        while (yield from self.peek()):
            emit(self.read(len(self._text) - self._at))

    def find(self, mark: str, emit: Callable[[str], None], *others: str) -> Steps[bool]:
        """Read up to a mark, or to one of ``others``, and begin to record. False at the end.

        The mark is read and recorded, with the white space behind it; others stay unread.
        """
        if not (yield from self.read_until((mark, *others), emit)):
            return False
        self.record()
        if (yield from self.read_mark(mark)):
            yield from self.read_space()
        return True

    def text_until(self, *marks: str) -> Steps[str]:
        """Read up to the first of the marks, which stays unread, and return the text."""
        kept: list[str] = []
        yield from self.read_until(marks, kept.append)
        return "".join(kept)

    def text_while(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the longest run of characters that ``pattern`` matches, and return it."""
        kept: list[str] = []
        yield from self.read_while(pattern, kept.append)
        return "".join(kept)

    def read_while(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Steps[None]:
        """Read the longest run of characters that ``pattern`` matches, one class repeated."""
        while (yield from self.peek()):
            found = pattern.match(self._text, self._at)
            if found is None or found.end() == self._at:
                return
            emit(self.read(found.end() - self._at))

    def read_space(self) -> Steps[str]:
        """Read white space, all that comes next, and return it."""
        return (yield from self.text_while(_SPACE))

    def read_until(self, marks: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str]:
        """Read up to the first of the marks and return it, unread; "" at the end.

        The text before it goes to ``emit``, as soon as it can be no part of a mark.
        """
        pattern, begins, longest = _finder(marks)
        while True:
            found = pattern.search(self._text, self._at)
            possible = (
                len(self._text) if self._ended else self._possible_mark(marks, begins, longest)
            )
            end = min(found.start(), possible) if found else possible
            if end > self._at:
                emit(self.read(end - self._at))
            if found and found.start() < possible:
                return found[0]
            if self._ended:
                return ""
            yield

    def _possible_mark(self, marks: tuple[str, ...], begins: re.Pattern[str], longest: int) -> int:
        """Return where the last characters begin that may become a mark."""
        start = max(self._at, len(self._text) - longest + 1)
        while (found := begins.search(self._text, start)) is not None:
            start = found.start()
            if any(self._may_become(mark, start) for mark in marks):
                return start
            start += 1
        return len(self._text)

    def _may_become(self, mark: str, start: int) -> bool:
        """Whether the text from ``start`` on is a proper part of a mark."""
        length = len(self._text) - start
        return length < len(mark) and self._text.endswith(mark[:length], start)


@cache
def _finder(marks: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return what finds a mark, what finds its first character, and the longest mark's length."""
    ordered = sorted(marks, key=len, reverse=True)
    firsts = "|".join({re.escape(mark[0]) for mark in marks})
    return re.compile("|".join(map(re.escape, ordered))), re.compile(firsts), len(ordered[0])
