"""The port for clients: one front holds it, and another one takes it when the first is gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kiln.engine.cli.listen import open_listener
from kiln.engine.errors import ConfigError
from kiln.engine.server.connection import Connection
from kiln.engine.server.middleware import MAX_HEADER_BYTES

_TRY_SECONDS = 0.05  # between two attempts to take the port
_KEEP_ALIVE_SECONDS = 75


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which only work in a main thread."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: Ray tells when to stop."""
        yield


class Port:
    """Serves an application on a port as soon as no other process listens there.

    Whichever way a process ends, the kernel frees its port at once. So of several processes one
    serves, without any agreement between them. Make it on an event loop.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Begin. Raises ConfigError if this host cannot have the port, ever."""
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._server = _Server(config)
        self._place = host, port
        listener = self._taken()
        self._serving = asyncio.create_task(self._serve(listener))

    async def drain(self) -> None:
        """Free the port, and return when the requests in flight have ended."""
        self._server.should_exit = True
        await self._serving

    def _taken(self) -> socket.socket | None:
        """Return a socket that listens, or None while another process has the port."""
        try:
            return open_listener(*self._place)
        except ConfigError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
                return None
            raise

    async def _serve(self, listener: socket.socket | None) -> None:
        while listener is None and not self._server.should_exit:
            await asyncio.sleep(_TRY_SECONDS)
            listener = self._taken()
        if listener is not None:
            with listener:
                await self._server.serve(sockets=[listener])
