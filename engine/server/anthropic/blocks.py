"""The content blocks of Anthropic's messages. Images, documents and the like are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from kiln.engine.server.fields import DirectCaller, Only, StrictModel
from kiln.engine.server.unions import one_of, text_or_parts


class CacheControl(StrictModel):
    """Where a prefix to keep ends. Without effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any] | None, Only(None, [])] = None


Texts: Any = text_or_parts(one_of({"text": TextBlock}))


class ThinkingBlock(StrictModel):
    """An assistant's reasoning. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(StrictModel):
    """An assistant's call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller = None


class ToolResultBlock(StrictModel):
    """A tool's answer to a call. ``is_error`` has no effect: the content tells the model."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


_Said = one_of({"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock})
_Told = one_of({"text": TextBlock, "tool_result": ToolResultBlock})


class UserTurn(StrictModel):
    """A user's turn: texts, and the results of tools that the last turn has called."""

    role: Literal["user"]
    content: text_or_parts(_Told)  # type: ignore[valid-type]


class AssistantTurn(StrictModel):
    """The model's turn."""

    role: Literal["assistant"]
    content: text_or_parts(_Said)  # type: ignore[valid-type]


class SystemTurn(StrictModel):
    """An instruction between two turns."""

    role: Literal["system"]
    content: Texts


ROLES = {"user": UserTurn, "assistant": AssistantTurn, "system": SystemTurn}
