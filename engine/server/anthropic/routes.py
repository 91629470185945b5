"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from kiln.engine.server.admission import read_request
from kiln.engine.server.answering import respond
from kiln.engine.server.anthropic.body import CountTokensRequest, MessagesRequest
from kiln.engine.server.anthropic.errors import OVERLOADED, PATH, AnthropicError
from kiln.engine.server.anthropic.form import MessagesForm
from kiln.engine.server.anthropic.translation import NAMES, chat_prompt, chat_request
from kiln.engine.server.openapi import describe_body
from kiln.engine.server.serving import Serving
from kiln.engine.server.translated import Translated

_ERRORS = {OVERLOADED: "The queue is full"}


class AnthropicMessage(TypedDict):
    """The response to POST /v1/messages."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]


class TokenCount(TypedDict):
    """The response to POST /v1/messages/count_tokens."""

    input_tokens: int


def messages_router(serving: Serving) -> APIRouter:
    """Return the routes for one engine."""
    router = APIRouter(tags=["Anthropic's API"])

    @router.post(PATH, **describe_body(MessagesRequest, AnthropicMessage, _ERRORS, AnthropicError))
    async def create_message(request: Request) -> Response:
        """Generate the next message of a conversation, in Anthropic's form."""
        body = await read_request(serving, request, MessagesRequest)
        chat = Translated(serving, request, lambda: chat_request(body), NAMES)
        generation = await chat.admit()
        thinking: Any = body.thinking
        hides = getattr(thinking, "display", None) == "omitted"
        return await respond(request, generation, MessagesForm(generation, hides))

    @router.post(
        f"{PATH}/count_tokens",
        **describe_body(CountTokensRequest, TokenCount, envelope=AnthropicError),
    )
    async def count_tokens(request: Request) -> TokenCount:
        """Count the tokens of a conversation's prompt."""
        body = await read_request(serving, request, CountTokensRequest)
        serving.require_ready()
        prompt = await Translated(serving, request, lambda: chat_prompt(body), NAMES).prompt()
        return {"input_tokens": len(prompt.token_ids)}

    return router
