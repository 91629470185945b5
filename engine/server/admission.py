"""From the bytes of a request to prompts and settings that the engine can take, or an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from anyio import to_thread
from pydantic import ValidationError
from starlette.requests import Request

from kiln.engine.errors import RequestError
from kiln.engine.prompts import Prompt, read_chats, read_prompts
from kiln.engine.sampling_params import SamplingParams
from kiln.engine.server.errors import ApiError, from_engine, from_validation
from kiln.engine.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from kiln.engine.server.serving import Serving

MAX_ANSWERS = 128  # prompts times n in one HTTP request
_LARGE_BODY = 32_768  # bytes from which on a body is read off the event loop
_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;|$)", re.IGNORECASE)

Body = TypeVar("Body", bound=GenerationRequest)
T = TypeVar("T")


async def read_body(request: Request, model: type[Body]) -> Body:
    """Parse and check a body. Raises ApiError: 415 for another type than JSON, 400, 413."""
    content_type = request.headers.get("content-type", "")
    if not _JSON_TYPE.match(content_type):
        shown = repr(content_type[:80]) if content_type else "not set"
        raise ApiError(415, f"Content-Type is {shown}: send application/json")
    data = await request.body()
    try:
        if len(data) < _LARGE_BODY:
            return model.model_validate_json(data)
        return await to_thread.run_sync(model.model_validate_json, data)
    except ValidationError as error:
        raise from_validation(error, model) from None


def read_params(serving: Serving, body: GenerationRequest) -> SamplingParams:
    """Check the model's name and the settings. Raises ApiError: 503, 404, 400 naming the field."""
    serving.require_ready()
    serving.require_model(body.model)
    try:
        return body.sampling_params(serving.settings.defaults)
    except RequestError as error:
        raise from_engine(error) from error


async def chat_prompts(serving: Serving, body: ChatCompletionRequest) -> list[Prompt]:
    """Render and tokenise a conversation, off the event loop. Raises ApiError."""
    messages = [{"role": one.role, "content": one.text} for one in body.messages]
    return await _in_thread(lambda: read_chats(messages, serving.tokenizer))


async def completion_prompts(serving: Serving, body: CompletionRequest) -> list[Prompt]:
    """Tokenise the prompts, off the event loop. Raises ApiError."""
    if not body.prompts:
        raise ApiError(400, "prompt: the list is empty", "prompt")
    if len(body.prompts) > MAX_ANSWERS:
        _refuse_answers(len(body.prompts), 1)
    return await _in_thread(lambda: read_prompts(body.prompts, serving.tokenizer))


def check(
    serving: Serving, body: GenerationRequest, prompts: list[Prompt], params: SamplingParams
) -> None:
    """Refuse what can never run, before anything is sent to the engine. Raises ApiError 400."""
    if len(prompts) * params.n > MAX_ANSWERS:
        _refuse_answers(len(prompts), params.n)
    info = serving.require_ready()
    if params.stop_strings and serving.tokenizer is None:
        raise ApiError(400, "stop: the model has no tokenizer; use stop_token_ids", "stop")
    for number, prompt in enumerate(prompts):
        _check_length(body, len(prompt.token_ids), info.max_model_len, number)


def _check_length(body: GenerationRequest, length: int, context: int, number: int) -> None:
    which = f"prompt {number}" if number else "the prompt"
    if length >= context:
        raise ApiError(
            400,
            f"{which} has {length} tokens, but the context is {context} tokens for prompt and "
            "answer together: shorten it",
            "prompt",
            "context_length_exceeded",
        )
    # Only what the request asked for is refused; a default is cut to what is left.
    max_tokens = body.asked_max_tokens
    if max_tokens is not None and max_tokens > context - length:
        name = body.own_names.get("max_tokens", "max_tokens")
        raise ApiError(
            400,
            f"{name}: is {max_tokens}, but {which} has {length} tokens and the context "
            f"is {context}: at most {context - length} are left",
            name,
            "context_length_exceeded",
        )


def _refuse_answers(prompts: int, n: int) -> None:
    raise ApiError(
        400, f"prompt: {prompts} prompts with n {n}: at most {MAX_ANSWERS} answers", "prompt"
    )


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await to_thread.run_sync(work)
    except RequestError as error:
        raise from_engine(error) from error
