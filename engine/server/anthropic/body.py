"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kiln.engine.server.anthropic.blocks import ROLES, CacheControl, Texts
from kiln.engine.server.anthropic.errors import NO_THREADS
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import Int, Only, StopTexts, StrictModel, Unsupported, listed
from kiln.engine.server.unions import one_of

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class CustomTool(StrictModel):
    """A tool that the client runs. Anthropic's own tools are not supported."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Annotated[bool | None, Only(None, False)] = None
    allowed_callers: Annotated[list[Any] | None, Only(None, ["direct"])] = None
    input_examples: Annotated[list[Any] | None, Only(None, [])] = None


class ToolMode(StrictModel):
    """Whether the model may or, with ``any``, must call tools, and whether several at once."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None
    name: None = None


class OneTool(StrictModel):
    """The model must call this tool, once."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


_TOOL_CHOICES = {"auto": ToolMode, "any": ToolMode, "none": ToolMode, "tool": OneTool}


class ThinkingEnabled(StrictModel):
    """Think before the answer. ``budget_tokens`` has no effect, ``max_tokens`` limits both."""

    type: Literal["enabled"]
    budget_tokens: Int
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(StrictModel):
    """Answer without thinking."""

    type: Literal["disabled"]


class ThinkingAdaptive(StrictModel):
    """Think as the model's chat template does by default."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


_THINKING = {
    "enabled": ThinkingEnabled,
    "disabled": ThinkingDisabled,
    "adaptive": ThinkingAdaptive,
}


class OutputFormat(StrictModel):
    """The JSON Schema that the text follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """The form of the text, and how much effort to make, where the chat template knows it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(StrictModel):
    """``user_id`` is only a label in the server's log."""

    user_id: str | None = None


class CountTokensRequest(StrictModel):
    """The body of POST /v1/messages/count_tokens: what the prompt is made of."""

    model: str | None = None
    messages: listed(one_of(ROLES, "role"))  # type: ignore[valid-type]
    system: Texts | None = None
    tools: listed(one_of({"custom": CustomTool}, default="custom")) | None = None  # type: ignore[valid-type]
    tool_choice: one_of(_TOOL_CHOICES) | None = None  # type: ignore[valid-type]
    thinking: one_of(_THINKING) | None = None  # type: ignore[valid-type]
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    speed: Annotated[str | None, Only(None, "standard")] = None
    context_management: Annotated[dict[str, Any] | None, Only(None, {"edits": []}, _KEEP_ALL)] = (
        None
    )
    mcp_servers: Annotated[list[Any] | None, Only(None, [])] = None

    @model_validator(mode="after")
    def _check_messages(self) -> CountTokensRequest:
        if not self.messages:
            raise ApiError(400, "messages: needs at least one message", "messages")
        if self.output_format is not None and self.output_config and self.output_config.format:
            says = "cannot be sent together with output_config.format: send one of them"
            raise ApiError(400, f"output_format: {says}", "output_format")
        return self


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: Int
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: Any = None
    container: Unsupported = None
    inference_geo: Unsupported = None

    @model_validator(mode="after")
    def _refuse_threads(self) -> MessagesRequest:
        if self.thread is not None:
            message = "thread: conversations are not kept here: send all messages"
            raise ApiError(400, message, "thread", NO_THREADS)
        return self
