"""Respond with a whole or a streamed output; an ``EventForm`` holds what differs among the APIs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kiln.engine.errors import KilnError
from kiln.engine.requests.request import TokenOutput
from kiln.engine.server.body_writer import BodyWriter
from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError, from_engine
from kiln.engine.server.exchange import Tokens, Work, note_error, note_work
from kiln.engine.server.gen_ai import generation_attributes
from kiln.engine.server.generation import Generation, GenerationError
from kiln.engine.server.responses import encode_json
from kiln.engine.server.sse import EventStream
from kiln.engine.server.threads import LARGE
from kiln.engine.text.outputs import CompletionDelta

_ENTRY_BYTES = 16  # least size of a response's JSON per token and per log-probability


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
    tokens, told = partial(_tokens, generation), partial(generation_attributes, generation)
    note_work(request, Work(generation.served.name, generation.body.user, tokens, told))
    try:
        if not generation.body.stream:
            data = await unless_gone(request.receive, _whole(generation, form))
            return Response(data, media_type="application/json")
        first = await _first(request, generation, form)
    except KilnError as error:
        raise _told(request, generation, error) from error
    return EventStream(_Events(request, generation, form, first))


async def _first(request: Request, generation: Generation, form: EventForm) -> bytes:
    """Start a generation and return the events of its first output."""
    tokens = generation.start()
    try:
        delta = generation.read(await unless_gone(request.receive, anext(tokens)))
        return form.opening() + form.chunk(*delta)
    except BaseException:
        await tokens.aclose()
        raise


async def _whole(generation: Generation, form: EventForm) -> bytes:
    """Return all outputs as JSON; large ones are serialized in a thread."""
    await generation.collect()

    def write() -> bytes:
        return encode_json(form.answer())

    entries = generation.usage["completion_tokens"] * (1 + (generation.params.logprobs or 0))
    size = entries * _ENTRY_BYTES
    return write() if size < LARGE else await generation.serving.threads.run(write, size)


class _Events:
    """The events of a generation whose first ones are made; an error becomes the last of them."""

    def __init__(
        self, request: Request, generation: Generation, form: EventForm, first: bytes
    ) -> None:
        self._request = request
        self._generation = generation
        self._form = form
        self._made = [first]  # and not written yet

    async def write_to(self, body: BodyWriter) -> None:
        """Write the events; those of outputs that have arrived together are one write."""
        form, generation, made = self._form, self._generation, self._made
        tokens = generation.tokens

        def take(output: TokenOutput) -> bool:
            made.append(form.chunk(*generation.read(output)))
            return not tokens.has_waiting and self._write(body)

        try:
            if self._write(body):
                await body.drain()
            while await tokens.feed(take):
                await body.drain()
            made.append(form.closing())
        except KilnError as error:
            told = _told(self._request, generation, error)
            note_error(self._request, told)
            made.append(form.failure(told))
        if self._write(body):
            await body.drain()

    def _write(self, body: BodyWriter) -> bool:
        """Write what was made; return whether to await ``drain``."""
        data = b"".join(self._made)
        self._made.clear()
        return bool(data) and body.write(data)

    async def aclose(self) -> None:
        """Abort the unfinished requests in the engine."""
        await self._generation.tokens.aclose()


def _told(request: Request, generation: Generation, error: KilnError) -> ApiError:
    """Return an engine error for the client; the error of a single request names its id."""
    told = from_engine(error)
    if told.param == "prompt":  # which the engine calls it, also for a chat
        told.param = generation.body.prompt_field
    if isinstance(error, GenerationError):
        told.message += f"; see request {request.state.request_id} in the server's log"
    return told


def _tokens(generation: Generation) -> Tokens:
    usage = generation.usage
    return Tokens(usage["prompt_tokens"], usage["completion_tokens"])
