"""Read a reply's text as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Generator

from kiln.engine.text.replies.deltas import ReplyDelta
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

Read = Callable[[TextSource, MessageBuilder], Steps[None]]


class ReplyReader:
    """Splits one output's text into reasoning, content and tool calls, as it is generated.

    ``ReplyFormats.reader`` makes one for each output. The concatenated deltas do not depend on how
    the text was split: a whole answer is pushed at once. ``read`` reads a source to its end; None:
    all text is content.
    """

    def __init__(self, read: Read | None, message: MessageBuilder) -> None:
        self._source = TextSource()
        self._message = message
        self._steps: Generator[None, None, None] | None = None
        if read is not None:
            self._steps = read(self._source, message)

    @property
    def has_calls(self) -> bool:
        """Whether there are tool calls so far."""
        return self._message.has_calls

    def push(self, text: str, *, last: bool = False) -> ReplyDelta:
        """Add text and return what can be told of it now; all of it if it is the ``last``."""
        if self._steps is None:
            return ReplyDelta(text)
        if text:
            self._source.add(text)
            next(self._steps, None)
        return self.finish() if last else self._message.take()

    def finish(self) -> ReplyDelta:
        """Return what was held back, because no more text follows. To be called once."""
        if self._steps is None:
            return ReplyDelta()
        self._source.end()
        for _ in self._steps:
            raise AssertionError("a reply's format waits for more text after the end")
        self._message.end()
        return self._message.take()
