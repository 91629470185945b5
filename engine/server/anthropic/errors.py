"""Anthropic's error envelope.

{"type": "error", "error": {"type", "message"}}
"""

from __future__ import annotations

from typing import Any, NotRequired  # pydantic's schemas need the second one

from typing_extensions import TypedDict

from kiln.engine.server.errors import ApiError


class AnthropicErrorBody(TypedDict):
    """The kind of an error, and its message. ``details`` are for programs."""

    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class AnthropicError(TypedDict):
    """The body of every error response of Anthropic's routes."""

    type: str
    error: AnthropicErrorBody


PATH = "/v1/messages"  # and the paths below it
OVERLOADED = 529
NO_THREADS = "thread_unsupported_request"  # clients then send all messages each time
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def status(error: ApiError) -> int:
    """Return the HTTP status: that of other routes, but 529 for a full queue."""
    return OVERLOADED if error.code == "queue_full" else error.status


def envelope(error: ApiError) -> dict[str, Any]:
    """Return the body of an error response, which is an event of a stream too."""
    code = status(error)
    kind = _TYPES.get(code, "invalid_request_error" if code < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": told}


def is_own(path: str) -> bool:
    """Whether errors of a path have this envelope."""
    return path == PATH or path.startswith(f"{PATH}/")
