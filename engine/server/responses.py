"""The response bodies, with OpenAI's names. Plain dicts, because each token needs one."""

from __future__ import annotations

from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic's schemas need these
    Required,
)

import msgspec
from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]

encode_json = msgspec.json.Encoder().encode


class PromptTokensDetails(TypedDict):
    """The part of the prompt that was not computed."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of one HTTP request, over all its prompts and outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    """One likely token at a position; ``bytes``, because a token may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """The sampled token at a position, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """The log-probabilities of a chat output."""

    content: list[ChatLogprob]


class FunctionCall(TypedDict):
    """The function of a tool call. ``arguments`` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the client is asked to make."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(TypedDict):
    """What a later chunk adds to a call: a piece of its arguments."""

    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """A part of the tool call ``index``; only the first one has ``id`` and ``type``."""

    index: Required[int]
    id: str
    type: Literal["function"]
    function: Required[FunctionCall | FunctionDelta]


class AssistantMessage(TypedDict):
    """A complete assistant message. ``content`` is null if there are only tool calls.

    ``reasoning`` and ``reasoning_content`` are the same text under its two names.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One of the ``n`` outputs. A request with its ``seed`` and n=1 reproduces it."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None
    seed: int | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """The response to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class Delta(TypedDict, total=False):
    """What a chunk adds to an output."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class CompletionLogprobs(TypedDict):
    """The log-probabilities of a completion: four lists with one entry per token.

    The first token of an echoed prompt has none.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One output; ordered by prompt, with the ``n`` outputs of each together."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    seed: NotRequired[int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class Completion(TypedDict):
    """The response to POST /v1/completions, and each event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class ErrorBody(TypedDict):
    """The error message, and the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(TypedDict):
    """The body of every error response."""

    error: ErrorBody


class Status(TypedDict):
    """The response of the health routes."""

    status: str


def finish_reason(reason: str | None) -> FinishReason | None:
    """Return OpenAI's finish reason for one of the engine; only "stop" and "length" map."""
    return "stop" if reason == "stop" else "length" if reason == "length" else None
