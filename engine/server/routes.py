"""The generation routes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kiln.engine.server.admission import admit, read_request
from kiln.engine.server.answering import respond
from kiln.engine.server.chat import ChatForm
from kiln.engine.server.completions import CompletionForm
from kiln.engine.server.openapi import describe_body
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest
from kiln.engine.server.responses import ChatCompletion, Completion
from kiln.engine.server.serving import Serving


def generation_router(serving: Serving) -> APIRouter:
    """Return the routes for one engine."""
    router = APIRouter(prefix="/v1", tags=["generation"])

    @router.post("/chat/completions", **describe_body(ChatCompletionRequest, ChatCompletion))
    async def create_chat_completion(request: Request) -> Response:
        """Generate a reply to a conversation."""
        body = await read_request(serving, request, ChatCompletionRequest)
        generation = await admit(serving, request, body)
        return await respond(request, generation, ChatForm(generation))

    @router.post("/completions", **describe_body(CompletionRequest, Completion))
    async def create_completion(request: Request) -> Response:
        """Complete one or several prompts, given as text or token ids."""
        body = await read_request(serving, request, CompletionRequest)
        generation = await admit(serving, request, body)
        return await respond(request, generation, CompletionForm(generation))

    return router
