"""uvicorn's connection protocol, with a timeout for everything that the client must do."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kiln.engine.server.body_writer import ConnectionWriter, offer_writer
from kiln.engine.server.errors import ApiError
from kiln.engine.server.middleware import BODY_SECONDS, ErrorResponse

_GRACE = 5.0  # seconds for the middleware's 408 to be sent

logger = logging.getLogger(__name__)


class Connection(H11Protocol):
    """Closes a connection after a timeout of the client.

    first byte of another request    closed after the keep-alive time, which uvicorn measures
    request headers        408, or no response if no byte of them arrived
    request body           the middleware returns 408; a reset if the body still continues
    reading the response   a reset, which aborts the request like any disconnect
    """

    header_seconds = 10.0  # from the connection, or the first byte of a later request, to the last
    body_seconds = BODY_SECONDS
    write_seconds = 30.0  # without the client reading a byte of a response

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading: asyncio.TimerHandle | None = None
        self._awaited: object = None  # h11's state for the client; None: it may send nothing
        self._has_answered = False  # a response on this connection
        self._writing: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes, when last looked at
        self._was_read = False  # since then: the buffer was emptied, and may be full again

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the headers."""
        super().connection_made(transport)
        self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeouts."""
        super().connection_lost(exc)
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and restart the timeout if the client's state changed."""
        super().data_received(data)
        self._wait_for_client()

    def handle_events(self) -> None:
        """Handle what was parsed; offer a new request a writer if its response will be chunked."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self.scope["http_version"] == "1.1":
            scope: Any = self.scope  # Starlette's type, and uvicorn's, of the same
            offer_writer(scope, ConnectionWriter(self.transport, self.flow))

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of an unread body."""
        self._has_answered = True
        super().on_response_complete()
        self._wait_for_client()
        self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection after the client has read its last response."""
        super().timeout_keep_alive_handler()
        self._watch_writing()

    def pause_writing(self) -> None:
        """Apply back-pressure to the response until the client reads."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Let the response continue: the client has read what waited for it."""
        super().resume_writing()
        self._was_read = True

    def _wait_for_client(self) -> None:
        """Start a timeout if the client must now send something else than before."""
        state: object = self.conn.their_state
        if state is h11.IDLE and self._has_answered and not self.conn.trailing_data[0]:
            state = None  # uvicorn waits for the keep-alive time
        if state is self._awaited and self._reading is not None:
            return
        self._awaited = state
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if state is h11.IDLE:
            self._reading = self.loop.call_later(self.header_seconds, self._refuse_headers)
        elif state is h11.SEND_BODY:
            limit = self.body_seconds + _GRACE
            self._reading = self.loop.call_later(limit, self.transport.abort)

    def _refuse_headers(self) -> None:
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            late = f"the headers took over {self.header_seconds:g} s"
            logger.warning("408: %s", late)  # neither method nor path is known
            answer = ErrorResponse(ApiError(408, late, code="timeout"))
            for event in (
                h11.Response(
                    status_code=408, headers=answer.raw_headers, reason=b"Request Timeout"
                ),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Check periodically that the client reads from the send buffer."""
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent and self._writing is None:
            self._was_read = False
            self._writing = self.loop.call_later(self.write_seconds, self._check_writing)

    def _check_writing(self) -> None:
        self._writing = None
        if not self._was_read and self.transport.get_write_buffer_size() >= self._unsent:
            self.transport.abort()
        else:
            self._watch_writing()
