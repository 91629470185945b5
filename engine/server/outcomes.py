"""One log line and one count for each request that ended badly.

refused or failed    a 4xx or 5xx status, or an error event in a stream whose status was 200
aborted (499)        the client left before its response was complete

A line has method, path, status, request id and the error's message, cut short. Prompts and keys are
never logged: of a 400's message, which may quote a value of the body, only the part before the
quotation is. With an access log each request has one line there instead, good or bad.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kiln.engine.server.access_log import AccessLog
from kiln.engine.server.body_writer import counted_writer
from kiln.engine.server.exchange import ABORTED, MAX_PATH, Exchange, printable
from kiln.engine.server.metrics import Metrics
from kiln.engine.server.tracing import RequestTraces

logger = logging.getLogger(__name__)


class Outcomes:
    """Logs and counts requests that were refused, failed or aborted; or logs all of them."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        access_log: AccessLog | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and report how it ended."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        exchange = Exchange(scope, time.monotonic())
        # Events of a stream do not pass ``watch``, so that they cost nothing here.
        writer = None if self._access_log is None else counted_writer(scope)

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.sent_status = message["status"]
                exchange.first_byte = time.monotonic()
            else:
                exchange.size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if writer is not None:
                exchange.size += writer.size
            self._report(exchange)

    def _report(self, exchange: Exchange) -> None:
        status = exchange.status
        if self._traces is not None:
            self._traces.record(exchange)
        if status == ABORTED:
            self._metrics.requests_aborted.inc()
        elif status >= 400:
            self._metrics.requests_refused.labels(str(status)).inc()
        if self._access_log is not None:
            self._access_log.log(exchange)
        elif status >= 400:
            logger.log(
                logging.ERROR if status >= 500 else logging.WARNING,
                "%s %s %d %s: %s",
                printable(exchange.scope["method"], 16),
                printable(exchange.scope["path"], MAX_PATH),
                status,
                exchange.request_id,
                exchange.reason,
                extra={"fields": {"status": status}},
            )
