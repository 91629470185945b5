"""Respond with a whole or a streamed output; an ``EventForm`` holds what differs among the APIs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kiln.engine.errors import KilnError
from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError, from_engine
from kiln.engine.server.generation import Generation, GenerationError
from kiln.engine.server.outcomes import note_error
from kiln.engine.server.responses import encode_json
from kiln.engine.server.sse import EventStream
from kiln.engine.server.threads import LARGE
from kiln.engine.text.outputs import CompletionDelta

_ENTRY_BYTES = 16  # least size of a response's JSON per token and per log-probability

logger = logging.getLogger(__name__)

Deltas = AsyncGenerator[tuple[int, CompletionDelta], None]


class EventForm(Protocol):
    """How one API formats its responses. Methods of streams return bytes, empty for no event."""

    def opening(self) -> bytes:
        """Return the first events of a stream."""

    def chunk(self, index: int, delta: CompletionDelta) -> bytes:
        """Return the events of a delta of output ``index``."""

    def closing(self) -> bytes:
        """Return the last events of a stream that is complete."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""

    def answer(self) -> Mapping[str, Any]:
        """Return the complete response body."""


async def respond(request: Request, generation: Generation, form: EventForm) -> Response:
    """Run a generation and return its response.

    A stream starts with the first token, so that an earlier error can still set the HTTP status.
    Raises ApiError for the engine's errors, and ClientDisconnect.
    """
    try:
        await unless_gone(request.receive, generation.check_grammar())
        if not generation.body.stream:
            data = await unless_gone(request.receive, _whole(generation, form))
            _log(request, generation)
            return Response(data, media_type="application/json")
        deltas = generation.deltas()
        first = await unless_gone(request.receive, anext(deltas))
    except KilnError as error:
        raise _told(request, generation, error) from error
    return EventStream(_events(request, generation, form, (first, deltas)))


async def _whole(generation: Generation, form: EventForm) -> bytes:
    """Return all outputs as JSON; large ones are serialized in a thread."""
    await generation.collect()

    def write() -> bytes:
        return encode_json(form.answer())

    entries = generation.usage["completion_tokens"] * (1 + (generation.params.logprobs or 0))
    size = entries * _ENTRY_BYTES
    return write() if size < LARGE else await generation.serving.threads.run(write, size)


async def _events(
    request: Request,
    generation: Generation,
    form: EventForm,
    begun: tuple[tuple[int, CompletionDelta], Deltas],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; an error becomes its last one."""
    first, deltas = begun
    async with contextlib.aclosing(deltas):
        yield form.opening()
        try:
            if events := form.chunk(*first):
                yield events
            async for index, delta in deltas:
                if events := form.chunk(index, delta):
                    yield events
            yield form.closing()
            _log(request, generation)
        except KilnError as error:
            told = _told(request, generation, error)
            note_error(request, told)
            yield form.failure(told)


def _told(request: Request, generation: Generation, error: KilnError) -> ApiError:
    """Return an engine error for the client; the error of a single request names its id."""
    told = from_engine(error)
    if told.param == "prompt":  # which the engine calls it, also for a chat
        told.param = generation.body.prompt_field
    if isinstance(error, GenerationError):
        told.message += f"; see request {request.state.request_id} in the server's log"
    return told


def _log(request: Request, generation: Generation) -> None:
    usage = generation.usage
    logger.info(
        "%s %s: %d prompt tokens, %d output tokens, user %.80r",
        request.scope["path"],
        request.state.request_id,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        generation.body.user,
    )
