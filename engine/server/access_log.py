"""The access log: one line for each request, without its text, its query string and its key."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

from kiln.engine.server.exchange import MAX_PATH, Exchange, printable

_MAX_NAME = 80  # characters of a model's name and of a user's

logger = logging.getLogger(__name__)


class AccessLog:
    """Logs requests; good ones to the paths ``quiet`` are left out."""

    def __init__(self, quiet: Collection[str] = ()) -> None:
        self._quiet = frozenset(quiet)

    def log(self, exchange: Exchange) -> None:
        """Log one line: INFO, or WARNING for a 4xx and ERROR for a 5xx status."""
        status, scope = exchange.status, exchange.scope
        if status < 400 and scope["path"] in self._quiet:
            return
        client = scope.get("client")
        fields: dict[str, Any] = {
            "client": "-" if client is None else _address(*client),
            "method": printable(scope["method"], 16),
            "path": printable(scope["path"], MAX_PATH),
            "status": status,
            "bytes": exchange.size,
            "seconds": round(time.monotonic() - exchange.started, 6),
        }
        if exchange.first_byte is not None:
            fields["first_byte_seconds"] = round(exchange.first_byte - exchange.started, 6)
        fields["request_id"] = exchange.request_id
        if (work := exchange.work) is not None:
            tokens = work.tokens()
            fields["model"] = printable(work.model, _MAX_NAME)
            fields["prompt_tokens"], fields["output_tokens"] = tokens
            if work.user is not None:
                fields["user"] = printable(work.user, _MAX_NAME)
        if status >= 400:
            fields["error"] = exchange.reason
        level = logging.INFO
        if status >= 400:
            level = logging.ERROR if status >= 500 else logging.WARNING
        logger.log(level, "%s", _as_text(fields), extra={"fields": fields})


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _as_text(fields: dict[str, Any]) -> str:
    """Return client, request and status as uvicorn writes them, and the rest as NAME=VALUE."""
    rest = dict(fields)
    client, method, path, status = (
        rest.pop(name) for name in ("client", "method", "path", "status")
    )
    named = " ".join(f"{name}={_value(value)}" for name, value in rest.items())
    return f'{client} - "{method} {path}" {status} {named}'


def _value(value: object) -> str:
    text = str(value)
    return repr(text) if not text or not text.isascii() or set(text) & set(" =\"'") else text
