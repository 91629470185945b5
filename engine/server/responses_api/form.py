"""Answers in the form of OpenAI's responses, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from kiln.engine.server.blocks import Block, Blocks, Change
from kiln.engine.server.errors import ApiError
from kiln.engine.server.generation import Generation
from kiln.engine.server.responses_api.body import ResponsesRequest, TextConfig
from kiln.engine.server.responses_api.output import Event, added, begun, ended, whole
from kiln.engine.server.sse import named_event
from kiln.engine.text.outputs import CompletionDelta

_ECHOED_OF_TOOLS = {"type", "name", "description", "parameters"}
_NO_TEXT = {"format": {"type": "text"}, "verbosity": "medium"}  # as if the field was left out


class ResponsesForm:
    """Formats the response to one request. Each event of a stream has the next number."""

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        self._generation = generation
        self._body = body
        self._created = int(time.time())
        self._blocks = Blocks()
        self._num_events = 0

    def opening(self) -> bytes:
        """Return the events before the first item."""
        response = self._response("in_progress", None)
        return self._events(
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        )

    def chunk(self, index: int, delta: CompletionDelta) -> bytes:
        """Return the events of a delta."""
        reply = self._generation.reply(index, delta)
        return self._events(*self._changes(self._blocks.push(reply)))

    def closing(self) -> bytes:
        """Return the events after the last delta."""
        ends = [*self._changes(self._blocks.finish())]
        answer = self._final()
        return self._events(*ends, {"type": f"response.{answer['status']}", "response": answer})

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        told = {"code": "server_error", "message": error.message}
        failed = {**self._response("failed", None), "error": told}
        return self._events({"type": "response.failed", "response": failed})

    def answer(self) -> dict[str, Any]:
        """Return the complete response body."""
        self._blocks.push(self._generation.whole_reply(0))
        return self._final()

    def _final(self) -> dict[str, Any]:
        status = "incomplete" if self._is_cut else "completed"
        return self._response(status, self._usage())

    @property
    def _is_cut(self) -> bool:
        return self._generation.completions[0].finish_reason == "length"

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._generation.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._generation.served.name,
            "output": [self._whole(block) for block in self._blocks.blocks],
            **self._echoed(),
            "usage": usage,
        }

    def _echoed(self) -> dict[str, Any]:
        """Return what repeats the request, with the values that were used. Nothing is kept."""
        body, params = self._body, self._generation.params
        effort = None if body.reasoning is None else body.reasoning.effort
        text, choice = body.text or TextConfig(), body.tool_choice or "auto"
        return {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {**_NO_TEXT, **text.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice,
            "tools": [
                {**tool.model_dump(include=_ECHOED_OF_TOOLS), "strict": bool(tool.strict)}
                for tool in body.tools or ()
            ],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "total_tokens": usage["total_tokens"],
        }

    def _reasoning_tokens(self) -> int:
        tokenizer = self._generation.serving.tokenizer
        texts = [block.text for block in self._blocks.blocks if block.kind == "reasoning"]
        if tokenizer is None:
            return 0
        return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    def _whole(self, block: Block) -> dict[str, Any]:
        """Return an item; the last one of an answer that was cut is incomplete."""
        is_last = block is self._blocks.blocks[-1]
        status = "incomplete" if is_last and self._is_cut else "completed"
        return whole(block, self._generation.request_id, status)

    def _changes(self, changes: Iterable[Change]) -> Iterable[Event]:
        for change in changes:
            block, request_id = change.block, self._generation.request_id
            match change.what:
                case "begin":
                    yield from begun(block, request_id)
                case "add":
                    yield added(block, request_id, change.text)
                case "end":
                    yield from ended(block, request_id, self._whole(block))

    def _events(self, *events: Event) -> bytes:
        sent = []
        for event in events:
            sent.append(named_event({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(sent)
