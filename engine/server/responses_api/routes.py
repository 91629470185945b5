"""The routes of OpenAI's Responses API. Responses are not kept, so none can be fetched later."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from kiln.engine.server.admission import read_request
from kiln.engine.server.answering import respond
from kiln.engine.server.errors import ApiError
from kiln.engine.server.openapi import describe_body
from kiln.engine.server.responses_api.body import ResponsesRequest
from kiln.engine.server.responses_api.form import ResponsesForm
from kiln.engine.server.responses_api.translation import NAMES, chat_request
from kiln.engine.server.serving import Serving
from kiln.engine.server.translated import Translated


class ResponseObject(TypedDict):
    """The response to POST /v1/responses. It repeats fields of the request too."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any] | None
    store: bool


def responses_router(serving: Serving) -> APIRouter:
    """Return the routes for one engine."""
    router = APIRouter(prefix="/v1/responses", tags=["responses"])

    @router.post("", **describe_body(ResponsesRequest, ResponseObject))
    async def create_response(request: Request) -> Response:
        """Generate a response to a text or to a list of items."""
        body = await read_request(serving, request, ResponsesRequest)
        chat = Translated(serving, request, lambda: chat_request(body), NAMES)
        generation = await chat.admit()
        return await respond(request, generation, ResponsesForm(generation, body))

    @router.get("/{response_id}")
    @router.delete("/{response_id}")
    @router.get("/{response_id}/input_items")
    @router.post("/{response_id}/cancel")
    async def find_response(response_id: str) -> Response:
        """Return 404: responses are not kept."""
        message = f"response_id: {response_id[:80]!r} is not here, because responses are not kept"
        raise ApiError(404, message, "response_id", "response_not_found")

    return router
