"""The items of an input: messages, function calls and their outputs, and reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kiln.engine.server.fields import DirectCaller, Only, StrictModel, Unsupported, listed
from kiln.engine.server.unions import one_of, text_or_parts

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictModel):
    """A text for the model."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(StrictModel):
    """A text of the model's. OpenAI's client adds ``parsed``."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any] | None, Only(None, [])] = None
    logprobs: Annotated[list[Any] | None, Only(None, [])] = None
    parsed: Any = None


_TEXTS = {"input_text": InputText, "output_text": OutputText, "text": InputText}


class MessageItem(StrictModel):
    """A message. Its id, status and phase have no effect."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: text_or_parts(one_of(_TEXTS))  # type: ignore[valid-type]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(StrictModel):
    """The model's call of a function. ``arguments`` is JSON text.

    The last three fields are those that OpenAI's client adds to an item that it sends back.
    """

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: DirectCaller = None
    namespace: Unsupported = None
    is_async: Unsupported = Field(None, alias="async")
    async_: Unsupported = None
    parsed_arguments: Any = None


class FunctionCallOutputItem(StrictModel):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: text_or_parts(one_of(_TEXTS))  # type: ignore[valid-type]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: DirectCaller = None
    namespace: Unsupported = None


class SummaryText(StrictModel):
    """A summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(StrictModel):
    """Reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(StrictModel):
    """The model's reasoning: its content, or else its summary."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: listed(SummaryText) | None = None  # type: ignore[valid-type]
    content: listed(ReasoningText) | None = None  # type: ignore[valid-type]
    encrypted_content: Unsupported = None
    status: Status | None = None


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
Items = one_of(
    {
        "message": MessageItem,
        "function_call": FunctionCallItem,
        "function_call_output": FunctionCallOutputItem,
        "reasoning": ReasoningItem,
    },
    default="message",
)
