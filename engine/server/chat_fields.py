"""The messages and tools in the body of a chat. What they mean is read by ``kiln.engine.text``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kiln.engine.errors import RequestError
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import Only, StrictModel, Unsupported, listed, text_or
from kiln.engine.text.messages import part_text


class ContentPart(StrictModel):
    """A part of a message's content: only text.

    Where the chat template wants one text, parts are joined by newlines.
    """

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: Any = Field(None, description="No effect")
    annotations: Any = Field(None, description="No effect")

    @model_validator(mode="before")
    @classmethod
    def _name_other_kinds(cls, part: Any) -> Any:
        """Refuse images, audio and files by their type, whatever other fields they have."""
        if isinstance(part, dict) and isinstance(part.get("type"), str):
            try:
                part_text({"text": "", "type": part["type"]}, "")
            except RequestError as error:
                raise ValueError(str(error).removeprefix(".type: ")) from error
        return part


class CalledFunction(StrictModel):
    """The function of an earlier call. ``arguments``: a JSON object as text."""

    name: str
    arguments: Any = None
    parsed_arguments: Any = Field(None, description="No effect")


class ToolCall(StrictModel):
    """A call that an assistant made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="No effect")
    cache_control: Any = Field(None, description="No effect")


Content: Any = text_or(listed(ContentPart))


class Message(StrictModel):
    """One turn of a conversation.

    Some fields are accepted because OpenAI's clients send a response back unchanged.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="An assistant's may be null or missing")
    name: str | None = Field(None, description="For the chat template")
    tool_calls: listed(ToolCall) | None = None  # type: ignore[valid-type]
    tool_call_id: str | None = Field(None, description="Of a tool's message: what it answers")
    reasoning_content: str | None = Field(None, description="The reasoning behind an answer")
    reasoning: str | None = Field(None, description="Another name of reasoning_content")
    thinking: str | None = Field(None, description="Another name of reasoning_content")
    cache_control: Any = Field(None, description="No effect")
    refusal: Unsupported = None
    annotations: Annotated[list[Any] | None, Only(None, [])] = None
    parsed: Any = Field(None, description="No effect")
    audio: Unsupported = None
    function_call: Unsupported = None


class ToolFunction(StrictModel):
    """A function that the model may call; ``parameters`` is a JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: Annotated[bool | None, Only(None, False)] = None


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction
    cache_control: Any = Field(None, description="No effect")


def check_tool_choice(choice: object) -> None:
    """Refuse a choice that needs a grammar. Raises ApiError."""
    if choice in (None, "none", "auto"):
        return
    shown = repr(choice)[:80] if isinstance(choice, str) else "to call one function"
    message = f"tool_choice: {shown} is not supported yet: send 'auto' or 'none'"
    if choice != "required" and not isinstance(choice, dict):
        message = f"tool_choice: must be 'auto' or 'none', got {repr(choice)[:80]}"
    raise ApiError(400, message, "tool_choice")
