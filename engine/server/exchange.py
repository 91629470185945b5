"""A request and its response, as the log and the traces tell them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import Scope

from kiln.engine.server.errors import ApiError

ABORTED = 499  # nginx's status for a client that closed its connection
MAX_PATH = 200  # characters
_MAX_MESSAGE = 300  # characters of a 4xx; a 5xx quotes nothing of the client's
_QUOTE = re.compile(r"(?<![\w)])['\"]")  # the first of a quotation; not an apostrophe


class Tokens(NamedTuple):
    """The tokens of a request: of its prompts, and of its answers so far."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a request made the engine do: a model's name, and functions that tell how far it came.

    ``user`` is the request's own label. ``attributes`` are those of a span.
    """

    model: str
    user: str | None
    tokens: Callable[[], Tokens]
    attributes: Callable[[], Mapping[str, Any]]


@dataclass(slots=True)
class Exchange:
    """One request. Times are ``time.monotonic``'s; ``size``: bytes of the response's body."""

    scope: Scope
    started: float
    sent_status: int | None = None
    first_byte: float | None = None
    size: int = 0

    @property
    def _state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.scope.get("state", {})
        return state

    @property
    def error(self) -> ApiError | None:
        """The error that was sent, also as an event of a stream whose status was 200."""
        return self._state.get("error")

    @property
    def work(self) -> Work | None:
        """What the engine did for it; None if it did not come so far."""
        return self._state.get("work")

    @property
    def request_id(self) -> str | None:
        """The id of the request."""
        return self._state.get("request_id")

    @property
    def status(self) -> int:
        """The status of the response, of an error in its stream, or ABORTED."""
        if self.error is not None:
            return self.error.status
        if self._state.get("aborted") or self.sent_status is None:
            return ABORTED
        return self.sent_status

    @property
    def reason(self) -> str:
        """What the log may say of why it ended badly."""
        if self.error is None:
            return "the client closed the connection" if self.status == ABORTED else "refused"
        message, status = self.error.message, self.status
        if status == 400:
            message = _QUOTE.split(message, maxsplit=1)[0].rstrip()
        return printable(message, len(message) if status >= 500 else _MAX_MESSAGE)


def note_error(request: Request, error: ApiError) -> None:
    """Tell of an error that is sent as an event of a stream."""
    request.state.error = error


def note_work(request: Request, work: Work) -> None:
    """Tell what a request makes the engine do."""
    request.state.work = work


def printable(text: str, most: int) -> str:
    """Return text on one line: a path can hold line breaks."""
    shown = text[:most] + ("…" if len(text) > most else "")
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in shown)
