"""Chat completions in OpenAI's format, whole and streamed."""

from __future__ import annotations

import time

from kiln.engine.requests.request import CompletionOutput
from kiln.engine.server.generation import Generation
from kiln.engine.server.logprobs import LogprobWriter
from kiln.engine.server.responses import (
    AssistantMessage,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    ToolCallDelta,
)
from kiln.engine.text.outputs import CompletionDelta
from kiln.engine.text.replies.deltas import ReplyDelta
from kiln.engine.text.replies.deltas import ToolCallDelta as CallPart


class ChatForm:
    """Formats the response to one chat request."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._model = generation.served.name
        self._include_usage = generation.body.include_usage
        self._id = f"chatcmpl-{generation.request_id}"
        self._created = int(time.time())
        count = generation.params.logprobs
        tokenizer = generation.serving.tokenizer
        self._logprobs = None if count is None else LogprobWriter(tokenizer, count)

    def opening(self) -> list[ChatChunk]:
        """Return one chunk with the role for each output."""
        return [
            self._chunk(self._choice(index, {"role": "assistant", "content": ""}))
            for index in range(len(self._generation.completions))
        ]

    def chunk(self, index: int, delta: CompletionDelta) -> ChatChunk | None:
        """Return the chunk of a delta of output ``index``; None if all its text is held back."""
        reply = self._generation.reply(index, delta)
        if not (reply or delta.logprobs or delta.finish_reason):
            return None
        choice = self._choice(index, _delta(reply), self._write_logprobs(delta))
        if delta.finish_reason is not None:
            choice["finish_reason"] = self._generation.finish_reason(index)
            choice["stop_reason"] = delta.stop_reason
            choice["seed"] = self._generation.completions[index].seed
        return self._chunk(choice)

    def usage_chunk(self) -> ChatChunk:
        """Return the last chunk, with the token counts and no choices."""
        return {**self._chunk(), "usage": self._generation.usage}

    def answer(self) -> ChatCompletion:
        """Return the complete response body."""
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": one.index,
                    "message": _message(self._generation.whole_reply(one.index)),
                    "logprobs": self._write_logprobs(one),
                    "finish_reason": self._generation.finish_reason(one.index),
                    "stop_reason": one.stop_reason,
                    "seed": one.seed,
                }
                for one in self._generation.completions
            ],
            "usage": self._generation.usage,
        }

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None
    ) -> ChatChunkChoice:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _write_logprobs(self, part: CompletionDelta | CompletionOutput) -> ChatLogprobs | None:
        return None if self._logprobs is None else self._logprobs.chat(part)


def _message(reply: ReplyDelta) -> AssistantMessage:
    """Return a complete message."""
    only_calls = reply.tool_calls and not reply.content
    message: AssistantMessage = {
        "role": "assistant",
        "content": None if only_calls else reply.content,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = message["reasoning"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id or "",
                "type": "function",
                "function": {"name": call.name or "", "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    return message


def _delta(reply: ReplyDelta) -> Delta:
    """Return what a chunk adds to a message."""
    new: Delta = {}
    if reply.reasoning:
        new["reasoning_content"] = new["reasoning"] = reply.reasoning
    if reply.content:
        new["content"] = reply.content
    if reply.tool_calls:
        new["tool_calls"] = [_call(part) for part in reply.tool_calls]
    return new


def _call(part: CallPart) -> ToolCallDelta:
    """Return a part of a call; the id, the type and the name come in the first one alone."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {
        "index": part.index,
        "id": part.call_id or "",
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }
