"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kiln.engine.server.chat_fields import FunctionName, mode_or
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import (
    CacheSalt,
    Int,
    Only,
    Priority,
    StrictModel,
    Unsupported,
    listed,
)
from kiln.engine.server.output_fields import JsonObjectFormat, NamedSchema, TextFormat
from kiln.engine.server.responses_api.items import Items
from kiln.engine.server.unions import one_of, text_or_parts

_NOT_KEPT = "responses are not kept here"
_MAX_METADATA = 64  # entries


class ResponseTool(StrictModel):
    """A function that the client runs. Built-in tools are not supported."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, Only(None, False)] = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: Annotated[list[Any] | None, Only(None, ["direct"])] = None


class ReasoningConfig(StrictModel):
    """``effort`` acts where the chat template knows it; a summary is not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseSchemaFormat(NamedSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


_FORMATS = {
    "text": TextFormat,
    "json_object": JsonObjectFormat,
    "json_schema": ResponseSchemaFormat,
}


class TextConfig(StrictModel):
    """The form of the text. ``verbosity`` has no effect."""

    format: one_of(_FORMATS) | None = None  # type: ignore[valid-type]
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseFunctionChoice(FunctionName):
    """One of the tools, by its name."""

    type: Literal["function"]


class ResponseAllowedTools(StrictModel):
    """The model sees all tools, and may call some of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: listed(ResponseFunctionChoice)  # type: ignore[valid-type]


_CHOICES = {"function": ResponseFunctionChoice, "allowed_tools": ResponseAllowedTools}


class ResponseStreamOptions(StrictModel):
    """No effect: nothing is obfuscated, and the last event always has the token counts."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None


class ResponsesRequest(StrictModel):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: text_or_parts(Items)  # type: ignore[valid-type]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: listed(one_of({"function": ResponseTool})) | None = None  # type: ignore[valid-type]
    tool_choice: mode_or(_CHOICES) | None = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = None
    user: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: Annotated[str | None, Only(None, "disabled")] = None
    include: listed(Literal["reasoning.encrypted_content"]) | None = None  # type: ignore[valid-type]
    top_logprobs: Annotated[int | None, Only(None, 0)] = None
    max_tool_calls: Int | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    prompt: Unsupported = None
    context_management: Annotated[list[Any] | None, Only(None, [])] = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        if not self.input:
            raise ApiError(400, "input: needs a text, or at least one item", "input")
        whole = f"{_NOT_KEPT}: send the whole conversation as input"
        for name, given, advice in (
            ("store", self.store, f"{_NOT_KEPT}: leave it out, or send false"),
            ("background", self.background, f"{_NOT_KEPT}: leave it out, or send false"),
            ("previous_response_id", self.previous_response_id is not None, whole),
            ("conversation", self.conversation is not None, whole),
        ):
            if given:
                raise ApiError(400, f"{name}: {advice}", name)
        return self
