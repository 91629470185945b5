"""The web application: routes, error handlers and middleware."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

import kiln
from kiln.engine.errors import RequestError
from kiln.engine.process.supervisor import Supervisor
from kiln.engine.server import openapi
from kiln.engine.server.access_log import AccessLog
from kiln.engine.server.adapters import LoadAdapterRequest, UnloadAdapterRequest, adapter_router
from kiln.engine.server.anthropic.body import CountTokensRequest, MessagesRequest
from kiln.engine.server.anthropic.routes import messages_router
from kiln.engine.server.embeddings import EmbeddingsRequest, embeddings_router
from kiln.engine.server.errors import ApiError, from_engine
from kiln.engine.server.exchange import ABORTED
from kiln.engine.server.hosts import KnownHosts
from kiln.engine.server.kernels import kernels_router
from kiln.engine.server.metrics import Metrics
from kiln.engine.server.middleware import OPEN_PATHS, ApiKey, ErrorResponse, Limits, RequestIds
from kiln.engine.server.models import models_router
from kiln.engine.server.outcomes import Outcomes
from kiln.engine.server.pages.routes import pages_router
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest
from kiln.engine.server.responses_api.body import ResponsesRequest
from kiln.engine.server.responses_api.routes import responses_router
from kiln.engine.server.root_path import RootPath, check_root_path
from kiln.engine.server.routes import generation_router
from kiln.engine.server.serving import ServerSettings, Serving
from kiln.engine.server.stats import stats_router
from kiln.engine.server.status import status_router
from kiln.engine.server.timeline import timeline_router
from kiln.engine.server.tokenize import DetokenizeRequest, TokenizeRequest, tokenize_router
from kiln.engine.server.tracing import RequestTraces
from kiln.engine.text.tokenizer import Tokenizer

# A new route adds its router, and its body for the OpenAPI document.
_ROUTERS = (
    generation_router,
    responses_router,
    messages_router,
    embeddings_router,
    tokenize_router,
    models_router,
    adapter_router,
    kernels_router,
    stats_router,
    timeline_router,
    status_router,
)
_BODIES = (
    *(ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
    *(ResponsesRequest, MessagesRequest, CountTokensRequest),
    *(EmbeddingsRequest, LoadAdapterRequest, UnloadAdapterRequest),
)


def create_app(
    engine: Supervisor,
    tokenizer: Tokenizer | None,
    settings: ServerSettings,
    traces: RequestTraces | None = None,
) -> FastAPI:
    """Return the application of an engine; its routes share ``app.state.serving``.

    Without a tokenizer it accepts only prompts of token ids. ``traces`` makes a span of each
    request; None: there are none.
    """
    metrics = Metrics(engine.stats, lambda: engine.client.is_ready, settings.served_model_name)
    serving = Serving(engine, tokenizer, settings, metrics, traces)
    app = _App(
        title="Kiln",
        version=kiln.__version__,
        description="OpenAI's API on kernels compiled at start-up.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
    )
    app.state.serving = serving
    for router in _ROUTERS:
        app.include_router(router(serving))
    app.include_router(pages_router(needs_key=settings.api_key is not None))
    app.add_exception_handler(ApiError, _on_refusal)
    app.add_exception_handler(RequestError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_unexpected)
    app.add_middleware(Limits, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key)
    openapi.install(app, _BODIES)
    if settings.root_path:
        own = (*app.openapi()["paths"], *OPEN_PATHS, "/openapi.json")
        check_root_path(settings.root_path, own)
    return app


class _App(FastAPI):
    """FastAPI with middleware around its handler of unexpected errors too.

    ``add_middleware`` puts its own inside, where a status 500 would lack their headers.
    """

    def build_middleware_stack(self) -> ASGIApp:
        """Return what serves a request."""
        serving: Serving = self.state.serving
        inner, settings = super().build_middleware_stack(), serving.settings
        if origins := settings.allowed_origins:
            inner = CORSMiddleware(
                inner,
                allow_origins=origins,
                allow_methods=("*",),
                allow_headers=("*",),
                expose_headers=("X-Request-Id", "Retry-After"),
            )
        if settings.allowed_hosts is not None:
            inner = KnownHosts(inner, settings.allowed_hosts, settings.allowed_origins)
        access_log = None if settings.quiet_paths is None else AccessLog(settings.quiet_paths)
        outer = RequestIds(Outcomes(inner, serving.metrics, access_log, serving.traces))
        return RootPath(outer, settings.root_path) if settings.root_path else outer


async def _on_refusal(request: Request, error: Exception) -> Response:
    """Return what a route, or what prepares a request for the engine, finds wrong with it."""
    assert isinstance(error, ApiError | RequestError)
    return ErrorResponse(error if isinstance(error, ApiError) else from_engine(error))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Return status 499 for the log; the client is gone."""
    return Response(status_code=ABORTED)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Return the router's own errors in OpenAI's envelope."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    message = {
        404: f"no route {path!r}; /docs lists them",
        405: f"{request.method[:16]} is not allowed on {path!r}",
    }.get(error.status_code, error.detail)
    response = ErrorResponse(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Return 500 with the request id; the traceback is in the log under that id."""
    request_id = getattr(request.state, "request_id", None)
    message = f"internal error; see request {request_id} in the server's log"
    return ErrorResponse(ApiError(500, message, code="internal_error"))
