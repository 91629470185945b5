"""The front: reads a request as far as routing needs it, and passes it to a replica and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kiln_call import Head, passed_on, read_call
from kiln_metrics import join_metrics
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kiln.engine.server.errors import ApiError
from kiln.engine.server.middleware import ErrorResponse
from kiln.engine.server.sse import DONE, event

_PROBE_SECONDS = 5.0
_REFUSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Front:
    """Answers for all replicas. ``served_names``: the model's names in requests."""

    def __init__(self, replicas: DeploymentHandle, served_names: tuple[str, ...]) -> None:
        self._replicas = replicas
        self._served_names = served_names

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        try:
            if request.url.path in _REFUSED:
                message = (
                    "adapters cannot come or go behind Ray Serve: a replica that starts later "
                    "would not have them. Name all of them at start, with --lora-modules"
                )
                raise ApiError(403, message, code="adapter_forbidden")
            if request.url.path == "/metrics" and request.method == "GET":
                return await self._metrics(request)
            return await self._pass_on(request)
        except ApiError as error:
            return ErrorResponse(error)

    async def _pass_on(self, request: Request) -> Response:
        call = await read_call(request, self._served_names)
        handle = self._replicas.options(
            method_name="handle", stream=True, multiplexed_model_id=call.adapter
        )
        # A probe must not wait for the first replica to start; another request may.
        is_probe = request.url.path.startswith("/health")
        items = handle.remote(call)
        try:
            async with asyncio.timeout(_PROBE_SECONDS if is_probe else None):
                head = await anext(items)
        except (RayError, RayServeException) as error:  # nothing to cancel: it has failed
            raise _unavailable(error) from error
        except TimeoutError as error:
            items.cancel()
            raise _unavailable(error) from error
        except asyncio.CancelledError:  # the client is gone
            items.cancel()
            raise
        assert isinstance(head, Head)
        response = StreamingResponse(_body(items, head), head.status)
        # Ray writes this header too; Kiln's has the same value, which Ray gave to the request.
        response.raw_headers = list(passed_on(head.headers, b"x-request-id"))
        return response

    async def _metrics(self, request: Request) -> Response:
        headers = passed_on(request.headers.raw, b"host", b"accept", b"accept-encoding")
        try:
            calls = self._replicas.broadcast("metrics", headers)
            answers = await calls.results_async(timeout_s=_PROBE_SECONDS)
        except (RayError, RayServeException, TimeoutError) as error:
            raise _unavailable(error) from error
        for _, status, content in answers:
            if status != 200:  # such as 401
                return Response(content, status, media_type="application/json")
        pages = {replica: content.decode() for replica, _, content in answers}
        return Response(join_metrics(pages), media_type="text/plain; version=0.0.4")


async def _body(items: DeploymentResponseGenerator, head: Head) -> AsyncGenerator[bytes, None]:
    """Yield the body. If the replica ends, so does a stream: with an error event, as Kiln's do."""
    is_stream = any(b"text/event-stream" in value for _, value in head.headers)
    try:
        async for chunk in items:
            yield chunk
    except RayError as error:
        if not is_stream:
            raise  # the connection closes before the end of the body
        yield event(_unavailable(error).envelope())
        yield DONE
    finally:
        items.cancel()  # no effect if it has ended; else Kiln aborts the request


def _unavailable(error: Exception) -> ApiError:
    """Return the response for a failure of Ray's or of a replica."""
    if isinstance(error, BackPressureError):
        return ApiError(503, "all replicas are busy", code="queue_full", retry_after=1)
    if isinstance(error, TimeoutError):
        return ApiError(503, "no replica answers", code="loading", retry_after=5)
    reason = str(error).strip().splitlines()[-1][:200]
    message = f"the replica failed before its answer was complete: {reason}"
    return ApiError(503, message, code="engine_unavailable", retry_after=5)
