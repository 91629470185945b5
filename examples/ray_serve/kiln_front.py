"""The front: reads a request as far as routing needs it, and passes it to a replica and back."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from kiln_call import MAX_BODY_BYTES, Call, Head, NotServed, passed_on, read_call
from kiln_counts import FAILED, page
from kiln_metrics import join_metrics
from kiln_port import Port
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError
from kiln.engine.server.hosts import KnownHosts
from kiln.engine.server.middleware import ErrorResponse, Limits, RequestIds
from kiln.engine.server.sse import DONE, event

_PROBE_SECONDS = 5.0
_REFUSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

logger = logging.getLogger("ray.serve")


class Front:
    """Answers for all replicas on a port of a host.

    ``served_names``: the model's names in requests. ``allowed_hosts``: this server's names; None:
    all.
    It listens by itself instead of behind Ray's HTTP proxy, which takes many seconds to come back
    if it ends, and answers in a form of its own. Of several fronts one has the port: see ``Port``.
    """

    async def __init__(  # type: ignore[misc]
        self,
        replicas: DeploymentHandle,
        served_names: tuple[str, ...],
        allowed_hosts: tuple[str, ...] | None,
        host: str,
        port: int,
    ) -> None:
        self._replicas = replicas
        self._served_names = served_names
        app: ASGIApp = Limits(self._app, MAX_BODY_BYTES)
        if allowed_hosts is not None:  # the replicas check the origins of pages
            app = KnownHosts(app, allowed_hosts, ("*",))
        self._port = Port(RequestIds(app), host, port)
        self._start = ""

    def reconfigure(self, settings: dict[str, str]) -> None:
        """Take over what the newest command says; Ray calls this."""
        self._start = settings["start"]

    async def start(self) -> str:
        """Return the id of the command's start that serves."""
        return self._start

    async def drain(self) -> None:
        """Accept no more requests, and return when those in flight have ended."""
        await self._port.drain()

    async def __del__(self) -> None:
        """Do the same; Ray calls this before it ends a front."""
        if hasattr(self, "_port"):  # else it could not start
            await self._port.drain()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        request = Request(scope, receive)
        answer: ASGIApp
        try:
            if request.url.path in _REFUSED:
                message = (
                    "adapters cannot come or go behind Ray Serve: a replica that starts later "
                    "would not have them. Name all of them at start, with --lora-modules"
                )
                raise ApiError(403, message, code="adapter_forbidden")
            if request.url.path == "/metrics" and request.method == "GET":
                answer = await self._metrics(request)
            else:
                answer = await self._pass_on(request)
        except ApiError as error:
            answer = ErrorResponse(error)
        except ClientDisconnect:
            return
        except Exception as error:
            logger.exception("the front failed")
            message = f"the front failed with {type(error).__name__}; its log says more"
            answer = ErrorResponse(ApiError(500, message, code="front_failed"))
        await answer(scope, receive, send)

    async def _pass_on(self, request: Request) -> ASGIApp:
        """Try one replica after the other until an engine has the request.

        A request that may have reached an engine is never sent again: it could end each in turn.
        """
        call = await read_call(request, self._served_names)
        # A probe must not wait for the first replica to start; another request may.
        seconds = _PROBE_SECONDS if request.url.path.startswith("/health") else None
        while True:
            items, first = await unless_gone(request.receive, self._begin(call, seconds))
            if isinstance(first, Head):
                return _Passed(items, first)
            FAILED.labels(first.reason).inc()
            if first.replica in call.tried:  # so were all others
                message = f"no replica is ready; the last one: {first.reason}"
                raise ApiError(503, message, code="loading", retry_after=5)
            call = dataclasses.replace(call, tried=call.tried | {first.replica})

    async def _begin(
        self, call: Call, seconds: float | None
    ) -> tuple[DeploymentResponseGenerator, Head | NotServed]:
        """Send a request to a replica; return all that it yields, and the first of it."""
        handle = self._replicas.options(
            method_name="handle", stream=True, multiplexed_model_id=call.adapter
        )
        items = handle.remote(call)
        try:
            async with asyncio.timeout(seconds):
                first = await anext(items)
        except (RayError, RayServeException) as error:  # nothing to cancel: it has failed
            raise _unavailable(error) from error
        except TimeoutError as error:
            items.cancel()
            raise _unavailable(error) from error
        except asyncio.CancelledError:  # the client is gone
            items.cancel()
            raise
        assert isinstance(first, Head | NotServed)
        return items, first

    async def _metrics(self, request: Request) -> Response:
        headers = passed_on(request.headers.raw, b"host", b"accept", b"accept-encoding")
        try:
            calls = self._replicas.broadcast("metrics", headers)
            answers = await calls.results_async(timeout_s=_PROBE_SECONDS, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise _unavailable(error) from error
        pages = {}
        for answer in answers:
            if isinstance(answer, Exception):  # of a replica that ends or starts
                continue
            replica, status, content = answer
            if status != 200:  # such as 401
                return Response(content, status, media_type="application/json")
            pages[replica] = content.decode()
        text = join_metrics(pages) + page()
        return Response(text, media_type="text/plain; version=0.0.4")


class _Passed:
    """The answer of a replica, passed on as it arrives."""

    def __init__(self, items: DeploymentResponseGenerator, head: Head) -> None:
        self._items = items
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. If the client leaves, Kiln aborts the request."""
        try:
            await unless_gone(receive, self._send(send))
        except ClientDisconnect:
            return
        finally:
            self._items.cancel()  # no effect if it has ended

    async def _send(self, send: Send) -> None:
        headers = list(self._head.headers)
        is_stream = any(b"text/event-stream" in value for _, value in headers)
        start = {"type": "http.response.start", "status": self._head.status, "headers": headers}
        await send(start)
        last = b""
        try:
            async for chunk in self._items:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except RayError as error:
            if not is_stream:
                raise  # the connection closes before the end of the body
            last = event(_unavailable(error).envelope()) + DONE
        await send({"type": "http.response.body", "body": last})


def _unavailable(error: Exception) -> ApiError:
    """Return the response for a failure of Ray's or of a replica."""
    if isinstance(error, BackPressureError):
        return ApiError(503, "all replicas are busy", code="queue_full", retry_after=1)
    if isinstance(error, TimeoutError):
        return ApiError(503, "no replica answers", code="loading", retry_after=5)
    FAILED.labels("lost").inc()
    reason = str(error).strip().splitlines()[-1][:200]
    message = f"the replica failed before its answer was complete: {reason}"
    return ApiError(503, message, code="engine_unavailable", may_retry=False)
