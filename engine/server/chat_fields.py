"""The messages and tools in the body of a chat. What they mean is read by ``kiln.engine.text``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag, model_validator

from kiln.engine.errors import RequestError
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import Only, StrictModel, Unsupported, listed, text_or
from kiln.engine.server.unions import one_of
from kiln.engine.text.messages import part_text
from kiln.engine.text.replies.tool_choice import ToolChoice


class ContentPart(StrictModel):
    """A part of a message's content: only text.

    Where the chat template wants one text, parts are joined by newlines.
    """

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: Any = None
    annotations: Any = None

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
    parsed_arguments: Any = None


class EarlierToolCall(StrictModel):
    """A call that an assistant made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    cache_control: Any = None


Content: Any = text_or(listed(ContentPart))


class Message(StrictModel):
    """One turn of a conversation.

    Some fields are accepted because OpenAI's clients send a response back unchanged.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: listed(EarlierToolCall) | None = None  # type: ignore[valid-type]
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    cache_control: Any = None
    refusal: Unsupported = None
    annotations: Annotated[list[Any] | None, Only(None, [])] = None
    parsed: Any = None
    audio: Unsupported = None
    function_call: Unsupported = None


class ToolFunction(StrictModel):
    """A function that the model may call; ``parameters`` is a JSON Schema of its arguments.

    With ``strict`` the arguments of every call follow it.
    """

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction
    cache_control: Any = None


class FunctionName(StrictModel):
    """The name of a function."""

    name: str


class FunctionChoice(StrictModel):
    """One of the tools, by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """Some of the tools; ``required``: one of them must be called."""

    mode: Literal["auto", "required"]
    tools: listed(FunctionChoice)  # type: ignore[valid-type]


class AllowedToolsChoice(StrictModel):
    """The model sees all tools, and may call some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def mode_or(kinds: Mapping[str, type[BaseModel]]) -> Any:
    """Return the type of a ``tool_choice``: a word, or one of some objects."""
    word = Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    forms: Any = word | Annotated[one_of(kinds), Tag("<list>")]
    return Annotated[
        forms, Discriminator(lambda value: "<text>" if isinstance(value, str) else "<list>")
    ]


ToolChoiceField: Any = mode_or({"function": FunctionChoice, "allowed_tools": AllowedToolsChoice})


def read_tool_choice(choice: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    """Return what a chat asks for. Raises ApiError for a function that is not among the tools."""
    if choice is None or isinstance(choice, str):
        if choice == "required" and not tools:
            raise ApiError(400, "tool_choice: 'required' needs tools to choose from", "tool_choice")
        return ToolChoice(choice or "auto")  # type: ignore[arg-type]  # checked by its field
    forced = isinstance(choice, FunctionChoice)
    chosen = [choice] if forced else choice.allowed_tools.tools
    names = frozenset(one.function.name for one in chosen)
    missing = names - {tool.function.name for tool in tools}
    if missing or not names:
        shown = repr(min(missing, default=""))[:80]
        says = f"{shown} is not among the tools" if missing else "names no tool"
        raise ApiError(400, f"tool_choice: {says}", "tool_choice")
    return ToolChoice("required" if forced else choice.allowed_tools.mode, names, forced)
