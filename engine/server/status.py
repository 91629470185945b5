"""The status routes: health, metrics and version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import kiln
from kiln.engine.server.errors import ApiError
from kiln.engine.server.responses import Status
from kiln.engine.server.serving import Serving


def status_router(serving: Serving) -> APIRouter:
    """Return the routes for one engine."""
    router = APIRouter()

    @router.get("/health/live", tags=["health"])
    async def live() -> Status:
        """Report whether the engine serves or will; 503 means that the server must be restarted."""
        if not serving.engine.is_alive:
            raise ApiError(503, "the engine has stopped", code="engine_unavailable")
        return {"status": "live"}

    @router.get("/health", tags=["health"], name="health")  # the path in vLLM and SGLang
    @router.get("/health/ready", tags=["health"])
    @router.post("/ping", tags=["health"])  # SageMaker's path
    @router.get("/ping", tags=["health"])
    async def ready() -> Status:
        """Report whether requests are accepted; 503 while loading, restarting, or draining."""
        serving.require_ready()
        return {"status": "ready"}

    @router.get("/version", tags=["status"])
    async def version() -> dict[str, str]:
        """Return Kiln's version."""
        return {"version": kiln.__version__}

    # Some probes send HEAD, which FastAPI answers only on routes that declare it.
    for path in ("/health/live", "/health", "/health/ready", "/ping"):
        probe = live if path == "/health/live" else ready
        router.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)

    @router.post("/reset_prefix_cache", tags=["status"], response_class=Response)
    async def reset_prefix_cache() -> Response:
        """Forget the keys and values of earlier prompts; running requests keep their own."""
        serving.require_ready()
        serving.client.reset_prefix_cache()
        return Response()

    @router.get("/metrics", tags=["status"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Return counters, gauges and latencies in Prometheus's format, or as OpenMetrics."""
        text, content_type = serving.metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    return router
