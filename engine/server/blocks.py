"""The blocks of an answer: runs of reasoning and of text, and tool calls, one after the other.

/v1/messages and /v1/responses send an answer as such a list, of which at most one block is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kiln.engine.text.replies.deltas import ReplyDelta, ToolCallDelta

BlockKind = Literal["reasoning", "text", "tool"]


@dataclass(slots=True)
class Block:
    """A part of an answer. ``index`` counts from 0; a tool's text is the JSON of its arguments.

    ``call`` is the index of the tool call in its answer, -1 for other blocks.
    """

    index: int
    kind: BlockKind
    call: int = -1
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to a block: it begins, gets more text, or ends."""

    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Collects the deltas of one answer in ``blocks``, and tells what each of them changes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, delta: ReplyDelta) -> list[Change]:
        """Add a delta and return what changes."""
        changes: list[Change] = []
        if delta.reasoning:
            changes += self._add(delta.reasoning, "reasoning")
        if delta.content:
            changes += self._add(delta.content, "text")
        for call in delta.tool_calls:
            changes += self._add(call.arguments, "tool", call)
        return changes

    def finish(self) -> list[Change]:
        """End the open block, if there is one."""
        ended, self._open = self._open, None
        return [] if ended is None else [Change("end", ended)]

    def _add(self, text: str, kind: BlockKind, call: ToolCallDelta | None = None) -> list[Change]:
        number = -1 if call is None else call.index
        block, changes = self._open, list[Change]()
        if block is None or (block.kind, block.call) != (kind, number):
            changes += self.finish()
            block = Block(len(self.blocks), kind, number)
            if call is not None:
                block.name, block.call_id = call.name or "", call.call_id or ""
            self.blocks.append(block)
            self._open = block
            changes.append(Change("begin", block))
        if text:
            block.pieces.append(text)
            changes.append(Change("add", block, text))
        return changes
