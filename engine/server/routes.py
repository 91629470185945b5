"""The routes that generate."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kiln.engine.server import admission
from kiln.engine.server.answering import respond
from kiln.engine.server.chat import ChatForm
from kiln.engine.server.completions import CompletionForm
from kiln.engine.server.generation import Generation
from kiln.engine.server.openapi import describe_body
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest
from kiln.engine.server.responses import ChatCompletion, Completion
from kiln.engine.server.serving import Serving


def generation_router(serving: Serving) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter(prefix="/v1", tags=["generation"])
    name = serving.settings.served_model_name

    @router.post("/chat/completions", **describe_body(ChatCompletionRequest, ChatCompletion))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        body = await admission.read_body(request, ChatCompletionRequest)
        params = admission.read_params(serving, body)
        prompts = await admission.chat_prompts(serving, body)
        admission.check(serving, body, prompts, params)
        generation = Generation(serving, prompts, params)
        form = ChatForm(generation, name, body.include_usage)
        return await respond(request, body, generation, form)

    @router.post("/completions", **describe_body(CompletionRequest, Completion))
    async def create_completion(request: Request) -> Response:
        """Continue one text or many, given as text or as token ids."""
        body = await admission.read_body(request, CompletionRequest)
        params = admission.read_params(serving, body)
        prompts = await admission.completion_prompts(serving, body)
        admission.check(serving, body, prompts, params)
        generation = Generation(serving, prompts, params)
        form = CompletionForm(generation, name, body.include_usage, bool(body.echo))
        return await respond(request, body, generation, form)

    return router
