"""What some text adds to an assistant message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call. ``name`` and ``call_id`` are set in a call's first delta only.

    ``index`` is the call's place in its message, from 0; ``arguments`` is JSON text to append to
    the call's arguments. If the text ended or broke inside the arguments, they end there too:
    nothing is completed.
    """

    index: int
    arguments: str
    name: str | None = None
    call_id: str | None = None


class ReplyDelta(NamedTuple):
    """What some text adds to a message. False if it adds nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is added."""
        return bool(self.content or self.reasoning or self.tool_calls)
