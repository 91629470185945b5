"""Answers in the form of Anthropic's messages, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from kiln.engine.server.anthropic.errors import envelope
from kiln.engine.server.blocks import Block, Blocks, Change
from kiln.engine.server.errors import ApiError
from kiln.engine.server.generation import Generation
from kiln.engine.server.sse import named_event
from kiln.engine.text.outputs import CompletionDelta

_STARTS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessagesForm:
    """Formats the response to one request. ``hides_thinking``: its blocks have no text."""

    def __init__(self, generation: Generation, hides_thinking: bool = False) -> None:
        self._generation = generation
        self._hides_thinking = hides_thinking
        self._id = f"msg_{generation.request_id}"
        self._blocks = Blocks()

    def opening(self) -> bytes:
        """Return the events before the first block."""
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**self._usage(), "output_tokens": 0}
        return _events({"type": "message_start", "message": start}, {"type": "ping"})

    def chunk(self, index: int, delta: CompletionDelta) -> bytes:
        """Return the events of a delta."""
        reply = self._generation.reply(index, delta)
        return _events(*self._changes(self._blocks.push(reply)))

    def closing(self) -> bytes:
        """Return the events after the last delta."""
        delta = {**self._stop(), "stop_details": None}
        return _events(
            *self._changes(self._blocks.finish()),
            {"type": "message_delta", "delta": delta, "usage": self._usage()},
            {"type": "message_stop"},
        )

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return _events(envelope(error))

    def answer(self) -> dict[str, Any]:
        """Return the complete response body."""
        self._blocks.push(self._generation.whole_reply(0))
        return self._message([self._whole(block) for block in self._blocks.blocks])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.served.name,
            "content": content,
            **self._stop(),
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, str | None]:
        """Return why the answer ended."""
        end = self._generation.completions[0]
        sequence = end.stop_reason if isinstance(end.stop_reason, str) else None
        if end.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            called = any(block.kind == "tool" for block in self._blocks.blocks)
            reason = "tool_use" if called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        """Return the token counts; cached tokens are no input tokens here."""
        usage = self._generation.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _changes(self, changes: Iterable[Change]) -> Iterable[dict[str, Any]]:
        for change in changes:
            block = change.block
            if change.what == "begin":
                start = _STARTS.get(block.kind) or {**self._whole(block), "input": {}}
                yield {
                    "type": "content_block_start",
                    "index": block.index,
                    "content_block": start,
                }
            elif change.what == "add":
                yield from self._delta(block, change.text)
            else:
                if block.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": self._id}
                    yield _block_delta(block, signature)
                yield {"type": "content_block_stop", "index": block.index}

    def _delta(self, block: Block, text: str) -> Iterable[dict[str, Any]]:
        match block.kind:
            case "text":
                yield _block_delta(block, {"type": "text_delta", "text": text})
            case "tool":
                yield _block_delta(block, {"type": "input_json_delta", "partial_json": text})
            case "reasoning" if not self._hides_thinking:
                yield _block_delta(block, {"type": "thinking_delta", "thinking": text})

    def _whole(self, block: Block) -> dict[str, Any]:
        """Return a complete block. Its signature only says where it came from."""
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                thinking = "" if self._hides_thinking else block.text
                return {"type": "thinking", "thinking": thinking, "signature": self._id}
            case "tool":
                return {
                    "type": "tool_use",
                    "id": block.call_id,
                    "name": block.name,
                    "input": _input(block.text),
                }


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, as far as they go if the answer ended in them."""
    try:
        read = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _block_delta(block: Block, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _events(*events: dict[str, Any]) -> bytes:
    return b"".join(named_event(event) for event in events)
