"""OpenAI's error envelope for all errors of the HTTP API.

    {"error": {"message", "type", "param", "code"}}

A message has one or two lines, names the field, and quotes at most 80 characters of the input.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from kiln.engine.errors import (
    AdapterBusyError,
    AdapterError,
    AdapterNotFoundError,
    AdapterPathError,
    ContextLengthError,
    EngineDeadError,
    KilnError,
    QueueFullError,
    RequestError,
    RequestLostError,
    SlowReaderError,
)
from kiln.engine.server.fields import FORMS
from kiln.engine.server.unions import TAG_PREFIX
from kiln.engine.text.messages import shortened

_MAX_SHOWN = 80  # characters of an invalid value
_MAX_ERRORS = 100  # above this number they are not listed
_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
_SENTENCES = {
    "missing": "is required",
    "none_required": "is not supported yet: leave it out, or send null",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
}
_WITHOUT_VALUE = frozenset(("missing", "value_error", "none_required", "model_type"))


class ApiError(Exception):
    """An error response. ``retry_after`` is in seconds, for errors that may go away.

    ``may_retry`` false tells OpenAI's and Anthropic's clients not to send the request again by
    themselves, as they do after most errors of a server.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        *,
        may_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.may_retry = may_retry

    def envelope(self) -> dict[str, Any]:
        """Return the response body."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """The extra headers for the status."""
        if self.status == 408:  # the rest of the body may still arrive: close the connection
            return {"Connection": "close"}
        if not self.may_retry:
            return {"X-Should-Retry": "false"}
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def from_engine(error: KilnError) -> ApiError:
    """Translate an error of the engine or of request validation."""
    match error:
        case QueueFullError():
            return ApiError(503, str(error), code="queue_full", retry_after=1)
        case ContextLengthError():
            return ApiError(400, str(error), error.param, "context_length_exceeded")
        case AdapterNotFoundError():
            return ApiError(404, str(error), "model", "model_not_found")
        case RequestError():
            return ApiError(400, str(error), error.param)
        case SlowReaderError():
            return ApiError(400, str(error), code="slow_reader")
        case RequestLostError():
            return ApiError(503, str(error), code="engine_unavailable", may_retry=False)
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_unavailable", retry_after=5)
    return ApiError(500, str(error), code="generation_failed")


def from_adapter_job(error: KilnError) -> ApiError:
    """Translate an error of loading or unloading a LoRA adapter."""
    match error:
        case AdapterBusyError():
            return ApiError(409, str(error), "lora_name", "adapter_busy", retry_after=1)
        case AdapterNotFoundError():
            return ApiError(404, str(error), "lora_name", "adapter_not_found")
        case AdapterPathError():
            return ApiError(403, str(error), "lora_path", "adapter_forbidden")
        case AdapterError():
            return ApiError(400, str(error), code="adapter_refused")
    return from_engine(error)


def from_validation(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Describe the errors of a body in one or two lines."""
    count = error.error_count()
    if count > _MAX_ERRORS:
        return ApiError(400, f"the body has {count} wrong or unknown fields")
    problems = error.errors(include_url=False)
    first, others = problems[0], problems[1:]
    if first["type"] == "json_invalid":
        reason = str(first["ctx"]["error"])[: 2 * _MAX_SHOWN]
        return ApiError(400, f"the body is not valid JSON: {reason}")
    message, param = _sentence(first, model)
    if others:
        message += f"\nand: {_sentence(others[0], model)[0]}"
    if len(others) > 1:
        message += f" (and {len(others) - 1} more)"
    return ApiError(400, message, param or None)


def unknown_fields(error: ValidationError) -> str:
    """Return the names of the fields that are unknown, cut to a line; empty if there are none."""
    if error.error_count() > _MAX_ERRORS:
        return "too many to list"
    problems = error.errors(include_url=False, include_input=False)
    names = [_place(one["loc"]) for one in problems if one["type"] == "extra_forbidden"]
    return ascii(", ".join(names))[1:-1][: 3 * _MAX_SHOWN]


def _sentence(problem: Any, model: type[BaseModel]) -> tuple[str, str]:
    """Return the message for one error, and the path of its field."""
    where = _place(problem["loc"])
    kind = problem["type"]
    if kind == "extra_forbidden":
        near = get_close_matches(str(problem["loc"][-1]), model.model_fields, 1)
        hint = f"; did you mean {near[0]}?" if near and len(problem["loc"]) == 1 else ""
        return f"{where}: is not a known field{hint}", where
    if kind == "too_long":
        return f"{where}: has too many entries, at most {problem['ctx']['max_length']}", where
    if kind == "value_error":
        return f"{where}: {problem['ctx']['error']}", where
    says = _SENTENCES.get(kind)
    if says is None:
        says = problem["msg"].replace("Input should be", "must be")
    if kind not in _WITHOUT_VALUE:
        says += f", got {shortened(problem['input'])}"
    return f"{where or 'the body'}: {says}", where


def _place(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, such as ``messages[0].content``; drops names of union members."""
    steps = [
        step for step in location if step not in FORMS and not str(step).startswith(TAG_PREFIX)
    ]
    path = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_SHOWN]}" for step in steps
    )
    return path.removeprefix(".")[: 2 * _MAX_SHOWN]
