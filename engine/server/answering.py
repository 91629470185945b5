"""Respond with a whole or a streamed output; a ``Form`` holds the differences between the APIs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from kiln.engine.errors import KilnError
from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError, from_engine
from kiln.engine.server.generation import Generation, GenerationError
from kiln.engine.server.outcomes import note_error
from kiln.engine.server.responses import Answer, Chunk, encode_json
from kiln.engine.server.sse import DONE, EventStream, event
from kiln.engine.server.threads import LARGE
from kiln.engine.text.outputs import CompletionDelta

_ENTRY_BYTES = 16  # least size of a response's JSON per token and per log-probability

logger = logging.getLogger(__name__)

Deltas = AsyncGenerator[tuple[int, CompletionDelta], None]


class Form(Protocol):
    """How one API formats its responses."""

    def opening(self) -> Sequence[Chunk]:
        """Return the first chunks of a stream."""

    def chunk(self, index: int, delta: CompletionDelta) -> Chunk | None:
        """Return the chunk of a delta of output ``index``; None if it says nothing yet."""

    def usage_chunk(self) -> Chunk:
        """Return the last chunk of a stream, with the token counts and no choices."""

    def answer(self) -> Answer:
        """Return the complete response body."""


async def respond(request: Request, generation: Generation, form: Form) -> Response:
    """Run a generation and return its response.

    A stream starts with the first token, so that an earlier error can still set the HTTP status.
    Raises ApiError for the engine's errors, and ClientGoneError.
    """
    try:
        if not generation.body.stream:
            data = await unless_gone(request.receive, _whole(generation, form))
            _log(request, generation)
            return Response(data, media_type="application/json")
        deltas = generation.deltas()
        first = await unless_gone(request.receive, _first(deltas))
    except KilnError as error:
        raise _told(request, generation, error) from error
    return EventStream(_events(request, generation, form, (first, deltas)))


async def _whole(generation: Generation, form: Form) -> bytes:
    """Return all outputs as JSON; large ones are serialized in a thread."""
    await generation.collect()

    def write() -> bytes:
        return encode_json(form.answer())

    entries = generation.usage["completion_tokens"] * (1 + (generation.params.logprobs or 0))
    size = entries * _ENTRY_BYTES
    return write() if size < LARGE else await generation.serving.threads.run(write, size)


async def _first(deltas: Deltas) -> tuple[int, CompletionDelta]:
    return await anext(deltas)


async def _events(
    request: Request,
    generation: Generation,
    form: Form,
    begun: tuple[tuple[int, CompletionDelta], Deltas],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; an error becomes its last event before [DONE]."""
    first, deltas = begun
    async with contextlib.aclosing(deltas):
        for opening in form.opening():
            yield event(opening)
        try:
            if (chunk := form.chunk(*first)) is not None:
                yield event(chunk)
            async for index, delta in deltas:
                if (chunk := form.chunk(index, delta)) is not None:
                    yield event(chunk)
            if generation.body.include_usage:
                yield event(form.usage_chunk())
            _log(request, generation)
        except KilnError as error:
            told = _told(request, generation, error)
            note_error(request, told)
            yield event(told.envelope())
        yield DONE


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
