"""One client's connection: uvicorn's protocol, with a time limit for whatever it waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kiln.engine.server.errors import ApiError
from kiln.engine.server.middleware import BODY_SECONDS
from kiln.engine.server.responses import encode_json

_GRACE = 5.0  # seconds for the middleware's 408 to be sent


class Connection(H11Protocol):
    """Closes a connection when its time for one of these is over.

    request headers      408, or no answer if no byte of them arrived
    request body         the middleware answers 408; if the body still goes on, a reset
    reading the answer   a reset, which aborts the request as any disconnect does
    """

    header_seconds = 10.0  # from the connection, or from an answer's end, to all of the headers
    body_seconds = BODY_SECONDS
    write_seconds = 30.0  # during which the client takes no byte of an answer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading: asyncio.TimerHandle | None = None
        self._awaited: object = None  # h11's state of the client
        self._writing: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes, when last looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the limits."""
        super().connection_lost(exc)
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and see what is missing still."""
        super().data_received(data)
        self._wait_for_client()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that nobody reads."""
        super().on_response_complete()
        self._wait_for_client()
        self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, once the client has taken its last answer."""
        super().timeout_keep_alive_handler()
        self._watch_writing()

    def pause_writing(self) -> None:
        """Let the answer wait for its reader."""
        super().pause_writing()
        self._watch_writing()

    def _wait_for_client(self) -> None:
        """Start a limit when the client has to send something else than before."""
        state = self.conn.their_state
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
            error = ApiError(
                408, f"the headers took over {self.header_seconds:g} s", code="timeout"
            )
            body = encode_json(error.envelope())
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (
                h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Look again in a while whether the client has taken any of what waits for it."""
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent and self._writing is None:
            self._writing = self.loop.call_later(self.write_seconds, self._check_writing)

    def _check_writing(self) -> None:
        self._writing = None
        if self.transport.get_write_buffer_size() >= self._unsent:
            self.transport.abort()
        else:
            self._watch_writing()
