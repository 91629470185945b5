"""The request bodies: every accepted field has an effect, and every other field is rejected.

Types are checked here. Ranges are checked by SamplingParams, for the server and ``LLM`` alike.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kiln.engine.errors import RequestError
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import (
    Int,
    LogitBias,
    Only,
    PromptField,
    StopField,
    StopTokenIds,
    StrictModel,
    Unsupported,
    listed,
    text_or_parts,
)
from kiln.engine.text.prompts import Prompt, read_chats, read_prompts
from kiln.engine.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling values for the fields that a request omits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class StreamOptions(StrictModel):
    """How to stream. ``include_usage`` adds one last chunk with the token counts."""

    include_usage: bool | None = None


class TextFormat(StrictModel):
    """The only supported response format: text."""

    type: Literal["text"]


class TextPart(StrictModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(StrictModel):
    """One turn of a conversation.

    The last five fields may be null, because OpenAI's clients send a response back unchanged.
    """

    role: Literal["system", "user", "assistant"]
    content: text_or_parts(TextPart)  # type: ignore[valid-type]
    refusal: Unsupported = None
    annotations: Annotated[list[Any] | None, Only(None, [])] = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Annotated[list[Any] | None, Only(None, [])] = None

    @property
    def text(self) -> str:
        """The content as one string."""
        content: Any = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class GenerationRequest(StrictModel):
    """The common fields of chat and completions."""

    model: str | None = Field(
        None, description="The name of the served model, also if omitted, or of a LoRA adapter"
    )
    max_tokens: Int | None = Field(
        None, description="Of one output; chat default: up to the context"
    )
    min_tokens: Int | None = Field(
        None, description="No stop token or stop string ends the output before this many"
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = Field(
        None, description="Sample from this many most likely tokens; 0 or -1 for all"
    )
    min_p: float | None = Field(
        None, description="Least probability of a token, relative to the most likely one"
    )
    seed: int | None = Field(None, description="The same seed and settings sample the same tokens")
    n: Int | None = Field(None, description="Outputs for each prompt, 1 to 8")
    stop: StopField | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = Field(None, description="Continue after the EOS token")
    skip_special_tokens: bool | None = Field(
        None, description="Remove special tokens from the text; true by default"
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string in the text"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Only a label in the server's log")
    presence_penalty: float | None = Field(
        None, description="Subtracted from the logits of tokens already generated, -2 to 2"
    )
    frequency_penalty: float | None = Field(
        None, description="Subtracted for each time a token was generated, -2 to 2"
    )
    repetition_penalty: float | None = Field(
        None, description="Divides the positive logits of tokens in prompt or output, 0.01 to 10"
    )
    logit_bias: LogitBias | None = Field(
        None, description="Added to the logits of token ids, -100 to 100"
    )
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: needs stream to be true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def echoes(self) -> bool:
        """Whether each output starts with its prompt."""
        return False

    @property
    def asked_max_tokens(self) -> int | None:
        """The requested limit of output tokens, if any."""
        return self.max_tokens

    def read_prompts(self, tokenizer: Tokenizer | None, max_tokens: int) -> list[Prompt]:
        """Tokenize the prompts. Raises RequestError, also for some prompts over ``max_tokens``."""
        raise NotImplementedError

    @property
    def default_max_tokens(self) -> int | None:
        """The default limit of output tokens; None: up to the context."""
        return None

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each position; None: disabled."""
        return None

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt, for errors."""
        return "prompt"

    @property
    def own_names(self) -> dict[str, str]:
        """SamplingParams fields that have another name in this body."""
        return {}

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Return the sampling parameters of one output. Raises RequestError naming the field."""
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                *("temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens", "stop"),
                *("stop_token_ids", "ignore_eos", "skip_special_tokens"),
                *("include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
                "repetition_penalty",
            )
            if getattr(self, name) is not None
        }
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        asked = self.asked_max_tokens
        settings = {
            **asdict(defaults),
            **given,
            "max_tokens": self.default_max_tokens if asked is None else asked,
            "logprobs": self.wanted_logprobs,
        }
        try:
            return SamplingParams(**settings)
        except RequestError as error:
            name = error.param or ""
            own = self.own_names.get(name, name)
            raise RequestError(str(error).replace(name, own, 1), own) from error


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: listed(Message)  # type: ignore[valid-type]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Any] | None, Only(None, [])] = None
    tool_choice: Annotated[Any, Only(None, "none", "auto")] = None
    functions: Unsupported = None
    function_call: Unsupported = None
    parallel_tool_calls: Unsupported = None
    reasoning_effort: Unsupported = None
    modalities: Annotated[list[Any] | None, Only(None, ["text"])] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    service_tier: Unsupported = None
    store: Annotated[bool | None, Only(None, False)] = None
    metadata: Unsupported = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if not self.messages:
            raise ApiError(400, "messages: needs at least one message", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                400,
                f"max_completion_tokens: is {self.max_completion_tokens}, but max_tokens is "
                f"{self.max_tokens}: send one of them",
                "max_completion_tokens",
            )
        return self

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt, for errors."""
        return "messages"

    def read_prompts(self, tokenizer: Tokenizer | None, max_tokens: int) -> list[Prompt]:
        """Render the conversation and tokenize it."""
        messages = [{"role": one.role, "content": one.text} for one in self.messages]
        return read_chats(messages, tokenizer, max_tokens)

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
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: PromptField
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Annotated[int | None, Only(None, 1)] = None
    suffix: Annotated[str | None, Only(None, "")] = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo: is not supported together with logprobs yet", "echo")
        if not self.prompt and not isinstance(self.prompt, str):
            raise ApiError(400, "prompt: the list is empty", "prompt")
        return self

    @property
    def echoes(self) -> bool:
        """Whether each output starts with its prompt."""
        return bool(self.echo)

    def read_prompts(self, tokenizer: Tokenizer | None, max_tokens: int) -> list[Prompt]:
        """Tokenize text prompts; a prompt has one of four forms."""
        return read_prompts(self.prompt, tokenizer, max_tokens)

    @property
    def default_max_tokens(self) -> int | None:
        """OpenAI's default."""
        return COMPLETION_MAX_TOKENS

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each position; None: disabled."""
        return self.logprobs
