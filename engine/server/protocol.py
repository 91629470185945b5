"""The request bodies: every accepted field has an effect, and every other field is rejected.

Types are checked here. Ranges are checked by SamplingParams, for the server and ``LLM`` alike.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from kiln.engine.errors import RequestError
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.requests.structured_outputs import FIELD
from kiln.engine.server.chat_fields import Message, Tool, ToolChoiceField, read_tool_choice
from kiln.engine.server.errors import ApiError
from kiln.engine.server.field_table import CHAT, COMPLETION, model_of
from kiln.engine.server.fields import (
    BadWords,
    CacheSalt,
    Int,
    LogitBias,
    Priority,
    PromptField,
    StopField,
    StopTokenIds,
    StrictModel,
    TokenIds,
    dumped,
    listed,
    without_nulls,
)
from kiln.engine.server.output_fields import OutputFields
from kiln.engine.text.prompts import Prompt, read_chats, read_prompts
from kiln.engine.text.replies.tool_choice import ToolChoice
from kiln.engine.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
ReasoningEffort = Annotated[str, Field(max_length=32)]
# Clients that always send ``logprobs`` send false where they want none, in both APIs.
CountOrFalse = Annotated[
    Int | None, BeforeValidator(lambda value: None if value is False else value)
]


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling values for the fields that a request omits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class StreamOptions(StrictModel):
    """How to stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


if TYPE_CHECKING:  # the fields that do not act are read from the table

    class _ChatRows(StrictModel): ...

    class _CompletionRows(StrictModel): ...

else:
    _ChatRows, _CompletionRows = model_of("ChatRows", CHAT), model_of("CompletionRows", COMPLETION)


class GenerationRequest(OutputFields):
    """The common fields of chat and completions; ``field_table`` describes each."""

    prompt_field: ClassVar[str] = "prompt"  # the field that holds the prompt, for errors
    default_max_tokens: ClassVar[int | None] = None  # of output tokens; None: up to the context
    model: str | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: Int | None = None
    stop: StopField | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: Int | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None  # acts in completions; a chat's may only be false

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        options = self.streaming
        if not self.stream and (options.include_usage or options.continuous_usage_stats):
            raise ApiError(400, "stream_options: needs stream to be true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs: is not available in a stream", "prompt_logprobs")
        return self

    @property
    def streaming(self) -> StreamOptions:
        """How to stream."""
        return self.stream_options or StreamOptions.model_construct()

    @property
    def only_echoes(self) -> bool:
        """Whether each output is its prompt alone."""
        return self.max_tokens == 0

    @property
    def asked_max_tokens(self) -> int | None:
        """The requested limit of output tokens, if any; the engine generates one at least."""
        return 1 if self.only_echoes else self.max_tokens

    def read_prompts(self, tokenizer: Tokenizer | None, max_tokens: int) -> list[Prompt]:
        """Tokenize the prompts. Raises RequestError, also for some prompts over ``max_tokens``."""
        raise NotImplementedError

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each position; None: disabled."""
        return None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each token of the prompt."""
        return self.prompt_logprobs

    @property
    def reply_tools(self) -> list[dict[str, Any]] | None:
        """The tools that a chat's reply may call; None if the output is no reply."""
        return None

    @property
    def chosen_tools(self) -> ToolChoice:
        """Which tool calls are allowed or demanded."""
        return ToolChoice("none")

    @property
    def keeps_all_calls(self) -> bool:
        """Whether a reply may have more than one tool call."""
        return True

    @property
    def own_names(self) -> dict[str, str]:
        """SamplingParams fields that have another name in this body."""
        return {}

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Return the sampling parameters of one output. Raises RequestError naming the field."""
        named = {field.name: getattr(self, field.name, None) for field in fields(SamplingParams)}
        asked, biases = self.asked_max_tokens, (self.logit_bias or {}).items()
        settings: dict[str, Any] = {
            **asdict(defaults),
            **without_nulls(**named),
            "max_tokens": self.default_max_tokens if asked is None else asked,
            "logprobs": self.wanted_logprobs,
            "prompt_logprobs": self.wanted_prompt_logprobs,
            "logit_bias": {int(token): bias for token, bias in biases} or None,
        }
        try:
            return SamplingParams(**{**settings, "structured_outputs": self.output_form})
        except RequestError as error:
            raise self.with_own_name(error) from error

    def with_own_name(self, error: RequestError) -> RequestError:
        """Return an error of SamplingParams or of a grammar with this body's name of the field."""
        name = error.param or ""
        own = (self.form_names | self.own_names).get(name, name)
        return type(error)(str(error).replace(name, own, 1), own or None)


class ChatCompletionRequest(_ChatRows, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    messages: listed(Message)  # type: ignore[valid-type]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: listed(Tool) | None = None  # type: ignore[valid-type]
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if not self.messages:
            raise ApiError(400, "messages: needs at least one message", "messages")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        read_tool_choice(self.tool_choice, self.tools or ())
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                400,
                f"max_completion_tokens: is {self.max_completion_tokens}, but max_tokens is "
                f"{self.max_tokens}: send one of them",
                "max_completion_tokens",
            )
        return self

    def read_prompts(self, tokenizer: Tokenizer | None, max_tokens: int) -> list[Prompt]:
        """Render the conversation and tokenize it."""
        effort = self.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort}
        tools = self.reply_tools or ()
        shown = [{**tool, "function": {**tool["function"], "strict": None}} for tool in tools]
        return read_chats(
            dumped(self.messages),
            tokenizer,
            max_tokens,
            tools=shown,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            chat_template_kwargs=variables | (self.chat_template_kwargs or {}),
            add_special_tokens=bool(self.add_special_tokens),
        )

    @property
    def reply_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model sees and the reply may call."""
        return [] if self.tool_choice == "none" else dumped(self.tools)

    @property
    def chosen_tools(self) -> ToolChoice:
        """Which tool calls are allowed or demanded."""
        return read_tool_choice(self.tool_choice, self.tools or ())

    @property
    def keeps_all_calls(self) -> bool:
        """Whether a reply may have more than one tool call."""
        return self.parallel_tool_calls is not False

    @property
    def asked_max_tokens(self) -> int | None:
        """The requested limit of output tokens, if any."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each position; None: disabled."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def own_names(self) -> dict[str, str]:
        """SamplingParams fields that have another name in this body."""
        names = {"logprobs": "top_logprobs"}
        if not self.form_names and self.structured_outputs is None:
            names[FIELD] = "tools"  # the grammar is that of their calls
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class CompletionRequest(_CompletionRows, GenerationRequest):
    """The body of POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = COMPLETION_MAX_TOKENS
    prompt: PromptField
    logprobs: CountOrFalse = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None and self.stream:
            raise ApiError(400, "echo: together with logprobs is not available in a stream", "echo")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise ApiError(400, "max_tokens: 0 is only for echo, and not in a stream", "max_tokens")
        if not self.prompt and not isinstance(self.prompt, str):
            raise ApiError(400, "prompt: the list is empty", "prompt")
        return self

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each token of the prompt."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    def read_prompts(self, tokenizer: Tokenizer | None, max_tokens: int) -> list[Prompt]:
        """Tokenize text prompts; a prompt has one of four forms."""
        special = self.add_special_tokens is not False
        return read_prompts(self.prompt, tokenizer, max_tokens, add_special_tokens=special)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each position; None: disabled."""
        return self.logprobs
