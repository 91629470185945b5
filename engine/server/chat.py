"""Chat completions in OpenAI's format, whole and streamed."""

from __future__ import annotations

from kiln.engine.requests.request import CompletionOutput
from kiln.engine.server.chunk_form import ChunkForm
from kiln.engine.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    Delta,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from kiln.engine.text.outputs import CompletionDelta
from kiln.engine.text.replies.deltas import ReplyDelta
from kiln.engine.text.replies.deltas import ToolCallDelta as CallPart


class ChatForm(ChunkForm):
    """Formats the response to one chat request."""

    is_chat = True
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    part_field = "delta"

    def begin(self, index: int) -> Delta:
        """Return the role."""
        return {"role": "assistant", "content": ""}

    def part(self, index: int, delta: CompletionDelta) -> ReplyDelta:
        """Return what a delta adds to the message."""
        return self._generation.reply(index, delta)

    def written(self, part: ReplyDelta) -> Delta:
        """Return what a chunk adds to the message."""
        return _delta(part)

    def text(self, part: ReplyDelta) -> tuple[str, str]:
        """Return content, or reasoning."""
        content, reasoning, calls = part
        if calls or (content and reasoning):
            return "", ""
        return (content, "content") if content else (reasoning, "reasoning")

    def with_text(self, text: str, field: str) -> ReplyDelta:
        """Return content, or reasoning."""
        return ReplyDelta(text) if field == "content" else ReplyDelta(reasoning=text)

    def choice(self, one: CompletionOutput) -> ChatChoice:
        """Return a complete output."""
        return {
            "index": one.index,
            "message": _message(self._generation.whole_reply(one.index)),
            "logprobs": self.positions(one),
            "finish_reason": self._generation.finish_reason(one.index),
            "stop_reason": one.stop_reason,
            "seed": one.seed,
        }

    def positions(self, part: CompletionDelta | CompletionOutput) -> ChatLogprobs | None:
        """Return the log-probabilities of some tokens; None if they are not requested."""
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
        message["tool_calls"] = [_call(call) for call in reply.tool_calls]
    return message


def _delta(reply: ReplyDelta) -> Delta:
    """Return what a chunk adds to a message."""
    new: Delta = {}
    if reply.reasoning:
        new["reasoning_content"] = new["reasoning"] = reply.reasoning
    if reply.content:
        new["content"] = reply.content
    if reply.tool_calls:
        new["tool_calls"] = [_part(part) for part in reply.tool_calls]
    return new


def _part(part: CallPart) -> ToolCallDelta:
    """Return a part of a call; the id, the type and the name come in the first one alone."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **_call(part)}


def _call(part: CallPart) -> ToolCall:
    function: FunctionCall = {"name": part.name or "", "arguments": part.arguments}
    return {"id": part.call_id or "", "type": "function", "function": function}
