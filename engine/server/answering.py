"""Answer a generation, at once or as a stream; what differs between the two APIs is a ``Form``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from kiln.engine.errors import KilnError
from kiln.engine.outputs import CompletionDelta
from kiln.engine.server.disconnect import ClientGoneError, unless_gone
from kiln.engine.server.errors import from_engine
from kiln.engine.server.generation import Generation
from kiln.engine.server.protocol import GenerationRequest
from kiln.engine.server.responses import Answer, Chunk, encode_json
from kiln.engine.server.sse import DONE, EventStream, event

logger = logging.getLogger(__name__)

Deltas = AsyncGenerator[tuple[int, CompletionDelta], None]


class Form(Protocol):
    """How one API writes its answers."""

    def opening(self) -> Sequence[Chunk]:
        """Return what a stream begins with."""

    def chunk(self, index: int, delta: CompletionDelta) -> Chunk:
        """Return what is new in answer ``index``."""

    def usage_chunk(self) -> Chunk:
        """Return the last chunk of a stream, with the token counts and no choice."""

    def answer(self) -> Answer:
        """Return all of it."""


async def respond(
    request: Request, body: GenerationRequest, generation: Generation, form: Form
) -> Response:
    """Run a generation and answer with it.

    A stream begins when its first token is there: until then the status can still tell of an
    error. Raises what the engine raises; a client that left gets nothing.
    """
    try:
        if not body.stream:
            await unless_gone(request.receive, generation.collect())
            _log(request, body, generation)
            return Response(encode_json(form.answer()), media_type="application/json")
        deltas = generation.deltas()
        first = await unless_gone(request.receive, _first(deltas))
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it; it is what the log shows
    except KilnError as error:
        raise from_engine(error) from error
    return EventStream(_events(request, body, generation, form, (first, deltas)))


async def _first(deltas: Deltas) -> tuple[int, CompletionDelta]:
    return await anext(deltas)


async def _events(
    request: Request,
    body: GenerationRequest,
    generation: Generation,
    form: Form,
    begun: tuple[tuple[int, CompletionDelta], Deltas],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; an error on the way is its last event before [DONE]."""
    first, deltas = begun
    async with contextlib.aclosing(deltas):
        for chunk in form.opening():
            yield event(chunk)
        try:
            if _says_something(first[1]):
                yield event(form.chunk(*first))
            async for index, delta in deltas:
                if _says_something(delta):
                    yield event(form.chunk(index, delta))
            if body.include_usage:
                yield event(form.usage_chunk())
            _log(request, body, generation)
        except KilnError as error:
            yield event(from_engine(error).envelope())
        yield DONE


def _says_something(delta: CompletionDelta) -> bool:
    """Whether a delta is worth an event: text that is held back is not."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)


def _log(request: Request, body: GenerationRequest, generation: Generation) -> None:
    usage = generation.usage
    logger.info(
        "%s %s: %d prompt tokens, %d output tokens, user %.80r",
        request.scope["path"],
        request.state.request_id,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        body.user,
    )
