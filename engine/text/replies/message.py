"""Assemble an assistant message from what a parser finds in its text."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from kiln.engine.text.replies.deltas import ReplyDelta, ToolCallDelta


def random_call_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


class MessageBuilder:
    """The message so far, and what of it is new since the last ``take``.

    White space around tool calls and reasoning is dropped, as the models' templates write it there
    themselves. A reply of content alone keeps all of it, and without ``may_call`` none is held
    back. With ``parallel`` false only the first call is kept, which is what OpenAI's
    ``parallel_tool_calls`` promises.
    """

    def __init__(self, *, may_call: bool, parallel: bool, new_id: Callable[[], str]) -> None:
        self._content, self._reasoning = _Text(), _Text()
        self._calls: list[_Call] = []
        self._may_call = may_call
        self._parallel = parallel
        self._dropping = False
        self._new_id = new_id
        self._changed: dict[int, None] = {}  # the calls with something new, in order

    @property
    def has_content(self) -> bool:
        """Whether there is content other than white space."""
        return bool(self._content.pieces)

    @property
    def has_calls(self) -> bool:
        """Whether there are tool calls."""
        return bool(self._calls)

    def content(self, text: str) -> None:
        """Add text for the user."""
        self._content.add(text, keep_leading=not self._calls)
        if not self._may_call:
            self._content.write_space()

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._reasoning.add(text, keep_leading=False)

    def call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call; ``arguments`` then belong to it."""
        self._dropping = bool(self._calls) and not self._parallel
        if not self._dropping:
            self._changed[len(self._calls)] = None
            self._calls.append(_Call(name, call_id or self._new_id()))

    def arguments(self, text: str) -> None:
        """Add JSON text to the arguments of the latest call."""
        if text and not self._dropping:
            self._changed[len(self._calls) - 1] = None
            self._calls[-1].pieces.append(text)

    def end(self) -> None:
        """End the message."""
        if not self._calls:
            self._content.write_space()

    def take(self) -> ReplyDelta:
        """Return what is new."""
        if not self._changed:
            return ReplyDelta(self._content.take(), self._reasoning.take())
        calls = tuple(self._calls[index].take(index) for index in self._changed)
        self._changed = {}
        return ReplyDelta(self._content.take(), self._reasoning.take(), calls)


@dataclass(slots=True)
class _Call:
    name: str
    call_id: str
    pieces: list[str] = field(default_factory=list)
    taken: int = -1  # how many pieces were taken; -1: the name was not

    def take(self, index: int) -> ToolCallDelta:
        """Return what is new; ``index`` is the call's place in its message."""
        new = "".join(self.pieces[max(self.taken, 0) :])
        first, self.taken = self.taken < 0, len(self.pieces)
        named = (self.name, self.call_id) if first else (None, None)
        return ToolCallDelta(index, new, *named)


@dataclass(slots=True)
class _Text:
    """Text whose last white space is held back until it is known what follows."""

    pieces: list[str] = field(default_factory=list)
    taken: int = 0
    _space: list[str] = field(default_factory=list)

    def add(self, text: str, keep_leading: bool) -> None:
        """Add text. Without ``keep_leading`` white space at the beginning is dropped."""
        body = text.rstrip()
        if body:
            if not self.pieces and not keep_leading:
                self._space, body = [], body.lstrip()
            self.write_space()
            self.pieces.append(body)
            text = text[len(text.rstrip()) :]
        self._space.append(text)

    def write_space(self) -> None:
        """Write the white space that was held back."""
        if self._space:
            self.pieces += filter(None, self._space)
            self._space = []

    def take(self) -> str:
        """Return what is new."""
        if self.taken == len(self.pieces):
            return ""
        new, self.taken = "".join(self.pieces[self.taken :]), len(self.pieces)
        return new
