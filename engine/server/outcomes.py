"""One log line and one count for each request that ended badly; nothing for a good one.

refused or failed    a 4xx or 5xx status, or an error event in a stream whose status was 200
aborted (499)        the client left before its response was complete

A line has method, path, status, request id and the error's message, cut short. Prompts and keys are
never logged: of a 400's message, which may quote a value of the body, only the part before the
quotation is.
"""

from __future__ import annotations

import logging
import re

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kiln.engine.server.errors import ApiError
from kiln.engine.server.metrics import Metrics

ABORTED = 499  # nginx's status for a client that closed its connection
_MAX_PATH = 200
_MAX_MESSAGE = 300  # characters of a 4xx; a 5xx quotes nothing of the client's
_QUOTE = re.compile(r"(?<![\w)])['\"]")  # the first of a quotation; not an apostrophe

logger = logging.getLogger(__name__)


class Outcomes:
    """Logs and counts requests that were refused, failed or aborted."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and report how it ended."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = ABORTED  # if there is no response at all

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._report(scope, status)

    def _report(self, scope: Scope, status: int) -> None:
        state = scope.get("state", {})
        error: ApiError | None = state.get("error")
        if error is not None:
            status = error.status  # also of a stream, whose status was 200
        elif state.get("aborted"):
            status = ABORTED
        if status < 400:
            return
        if status == ABORTED:
            self._metrics.requests_aborted.inc()
        else:
            self._metrics.requests_refused.labels(str(status)).inc()
        logger.log(
            logging.ERROR if status >= 500 else logging.WARNING,
            "%s %s %d %s: %s",
            _printable(scope["method"], 16),
            _printable(scope["path"], _MAX_PATH),
            status,
            state.get("request_id"),
            _reason(status, error),
        )


def note_error(request: Request, error: ApiError) -> None:
    """Tell ``Outcomes`` of an error that is sent as an event of a stream."""
    request.state.error = error


def _reason(status: int, error: ApiError | None) -> str:
    """Return what a line says of an error."""
    if error is None:
        return "the client closed the connection" if status == ABORTED else "refused"
    message = error.message
    if status == 400:
        message = _QUOTE.split(message, maxsplit=1)[0].rstrip()
    return _printable(message, len(message) if status >= 500 else _MAX_MESSAGE)


def _printable(text: str, most: int) -> str:
    """Return text on one line: a path can hold line breaks."""
    shown = text[:most] + ("…" if len(text) > most else "")
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in shown)
