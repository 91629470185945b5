"""The items of an output, and the events that tell of them.

An item's events: ``output_item.added``, for a text the same of its part, deltas, each of these
``done``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kiln.engine.server.blocks import Block

Event = dict[str, Any]

_PREFIXES = {"reasoning": "rs", "text": "msg", "tool": "fc"}
_TEXT_EVENTS = {"reasoning": "response.reasoning_text", "text": "response.output_text"}
_ARGUMENTS = "response.function_call_arguments"


def whole(block: Block, request_id: str, status: str) -> dict[str, Any]:
    """Return a block as an item of an output."""
    parts = [_part(block, block.text)]
    return {**_item(block, request_id, parts, block.text), "status": status}


def begun(block: Block, request_id: str) -> Iterator[Event]:
    """Yield the events that begin an item."""
    item = {**_item(block, request_id, [], ""), "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
    if block.kind != "tool":
        yield {
            "type": "response.content_part.added",
            **_place(block, request_id),
            "part": _part(block, ""),
        }


def added(block: Block, request_id: str, text: str) -> Event:
    """Return the event of more text of an item."""
    kind = _TEXT_EVENTS.get(block.kind, _ARGUMENTS)
    return {"type": f"{kind}.delta", **_place(block, request_id), "delta": text}


def ended(block: Block, request_id: str, item: dict[str, Any]) -> Iterator[Event]:
    """Yield the events that end an item, which is complete."""
    place = _place(block, request_id)
    if block.kind == "tool":
        yield {"type": f"{_ARGUMENTS}.done", **place, "name": block.name, "arguments": block.text}
    else:
        yield {"type": f"{_TEXT_EVENTS[block.kind]}.done", **place, "text": block.text}
        part = _part(block, block.text)
        yield {"type": "response.content_part.done", **_place(block, request_id), "part": part}
    yield {"type": "response.output_item.done", "output_index": block.index, "item": item}


def _id(block: Block, request_id: str) -> str:
    return f"{_PREFIXES[block.kind]}_{request_id}_{block.index}"


def _place(block: Block, request_id: str) -> dict[str, Any]:
    """Return the fields that say what a text event belongs to."""
    place: dict[str, Any] = {"item_id": _id(block, request_id), "output_index": block.index}
    if block.kind != "tool":
        place["content_index"] = 0
    return place


def _item(
    block: Block, request_id: str, parts: list[dict[str, Any]], arguments: str
) -> dict[str, Any]:
    own = {"id": _id(block, request_id)}
    match block.kind:
        case "reasoning":
            return {**own, "type": "reasoning", "summary": [], "content": parts}
        case "text":
            return {**own, "type": "message", "role": "assistant", "content": parts}
        case "tool":
            return {
                **own,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": arguments,
            }


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
