"""The routes that show how the server tokenizes: vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from kiln.engine.server.admission import read_request
from kiln.engine.server.chat_fields import Message, Tool
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import StrictModel, TokenIds, listed
from kiln.engine.server.openapi import describe_body
from kiln.engine.server.protocol import ChatCompletionRequest
from kiln.engine.server.responses import encode_json
from kiln.engine.server.serving import Serving
from kiln.engine.text.prompts import Prompt
from kiln.engine.text.tokenizer import Tokenizer

_OF_MESSAGES = (
    *("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: listed(Message) | None = None  # type: ignore[valid-type]
    tools: listed(Tool) | None = None  # type: ignore[valid-type]
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt: send either prompt or messages", "prompt")
        for name in _OF_MESSAGES:
            if self.messages is None and getattr(self, name) is not None:
                raise ApiError(400, f"{name}: needs messages", name)
        return self

    def read(self, tokenizer: Tokenizer) -> Prompt:
        """Tokenize what was sent. Raises RequestError."""
        if self.messages is not None:
            names = ("messages", "add_special_tokens", *_OF_MESSAGES)
            given = {name: getattr(self, name) for name in names}
            chat = ChatCompletionRequest.model_validate(given)
            return chat.read_prompts(tokenizer, sys.maxsize)[0]
        added = self.add_special_tokens is not False
        text = self.prompt or ""
        return Prompt(tokenizer.encode(text, add_special_tokens=added), text)


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class Tokens(TypedDict):
    """The response to POST /tokenize. ``max_model_len`` is the context, prompt and answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    """The response to POST /detokenize; special tokens are part of the text."""

    prompt: str


def tokenize_router(serving: Serving) -> APIRouter:
    """Return the routes for one engine."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", **describe_body(TokenizeRequest, Tokens))
    async def tokenize(request: Request) -> Response:
        """Count and return the token ids of a prompt or a conversation."""
        body = await read_request(serving, request, TokenizeRequest)
        context = serving.require_ready().max_model_len
        tokenizer = _require_tokenizer(serving, body.model)

        def work() -> Tokens:
            ids = body.read(tokenizer).token_ids
            forms = tokenizer.token_forms(ids) if body.return_token_strs else None
            return {
                "count": len(ids),
                "max_model_len": context,
                "tokens": ids,
                "token_strs": forms,
            }

        return await _answer(serving, request, work)

    @router.post("/detokenize", **describe_body(DetokenizeRequest, DetokenizedText))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        body = await read_request(serving, request, DetokenizeRequest)
        limit = serving.require_ready().vocab_size
        tokenizer = _require_tokenizer(serving, body.model)
        if body.tokens and max(body.tokens) >= limit:
            message = f"tokens: has token id {max(body.tokens)}, but the vocabulary is 0 to "
            raise ApiError(400, f"{message}{limit - 1}", "tokens")

        def work() -> DetokenizedText:
            return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}

        return await _answer(serving, request, work)

    return router


async def _answer(
    serving: Serving, request: Request, work: Callable[[], Tokens | DetokenizedText]
) -> Response:
    """Run ``work`` outside the event loop, with the writing of its result."""
    data = await serving.threads.run_for(request, lambda: encode_json(work()))
    return Response(data, media_type="application/json")


def _require_tokenizer(serving: Serving, model: str | None) -> Tokenizer:
    """Return the served model's tokenizer. Raises ApiError if there is none, or no such model."""
    serving.require_model(model)
    if serving.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer: the server takes and returns token ids")
    return serving.tokenizer
